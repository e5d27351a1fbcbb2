"""Options as dataclass fields. Their metadata gives flags, help and checks."""

from __future__ import annotations

import dataclasses
import functools
import operator
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ..core.words import suggestion
from ..errors import ConfigError
from .modes import Mode, names_of_modes

_KEY = "option"
_LIMITS = {
    "minimum": (">=", operator.ge),
    "above": (">", operator.gt),
    "maximum": ("<=", operator.le),
    "below": ("<", operator.lt),
}


@dataclass(frozen=True)
class OptionInfo:
    """Metadata of an option: help text, limits, choices and modes.

    Attributes:
        help: The effect of the option, without facts that follow from the other attributes.
        metavar: The text that help shows in place of a value; None for the type's name.
        minimum, above, maximum, below: Limits of the valid numbers: at least, more than, at most, less than.
        if_none: For an option that is None unless given: the value that is used then; see ``value_of``.
        default_text: For an option that is None unless given: what determines the value that is used then.
        also: A second spelling of the flag.
        choices: The valid words; empty if the type determines the valid values.
        modes: Returns whether the option is valid in a mode; None if it is valid in all modes.
        is_repeated: Whether the flag may be given several times; the option's value is then a tuple.
        has_negative: Whether a boolean option also has a flag ``--no-NAME``.
        is_common: Whether ``--help`` describes the option; ``--help-all`` describes all options.
        requires: Another option, without which this one has no effect.
        excludes: Another option, which cannot be given together with this one.
        is_simulated: Whether ``mpitrain simulate`` predicts its effect.
        change: The value of ``--may-change`` with which ``mpitrain tune`` varies the option; empty: it varies the
            option always, because the results stay the same; None: never.
        tried: The values that ``tune`` tries; empty if they depend on the job or on the ranks.
        tried_in: Returns whether ``tune`` tries them in a mode; None: in all modes in which the option is valid.
        is_part_of_model: Whether a trained model depends on the option outside of training, too.
        is_place: Whether it only says where a run is stored and when it ends, so that runs are compared without it.
        is_for_restarts: Whether it concerns restarts; commands that start short runs only do not have it.
        with_join: Whether a learner (``--join``) has it, too, in whatever mode.
        names_hosts: Whether it says which hosts take part, or how they are reached.
        in_scripts: For an option that a ``Trainer`` does not have: what a script does instead.
    """

    help: str
    metavar: str | None = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    if_none: Any = None
    default_text: str = ""
    also: str = ""
    choices: tuple[str, ...] = ()
    modes: Callable[[Mode], bool] | None = None
    is_repeated: bool = False
    has_negative: bool = True
    is_common: bool = False
    requires: str = ""
    excludes: str = ""
    is_simulated: bool = False
    change: str | None = None
    tried: tuple[Any, ...] = ()
    tried_in: Callable[[Mode], bool] | None = None
    is_part_of_model: bool = False
    is_place: bool = False
    is_for_restarts: bool = False
    with_join: bool = False
    names_hosts: bool = False
    in_scripts: str = ""

    @property
    def limits(self) -> str:
        """The limits of the valid numbers, such as ``> 0 and <= 1``; empty if all numbers are valid."""
        limits = {name: getattr(self, name) for name in _LIMITS}
        return " and ".join(f"{_LIMITS[name][0]} {limit}" for name, limit in limits.items() if limit is not None)

    def accepts(self, number: float) -> bool:
        """Return whether a number is within the limits."""
        limits = {name: getattr(self, name) for name in _LIMITS}
        return all(_LIMITS[name][1](number, limit) for name, limit in limits.items() if limit is not None)

    def is_valid_in(self, mode: Mode) -> bool:
        """Return whether the option has an effect in a mode."""
        return self.modes is None or self.modes(mode)

    def is_tried_in(self, mode: Mode) -> bool:
        """Return whether ``tune`` tries values of the option in a mode."""
        return self.is_valid_in(mode) and (self.tried_in is None or self.tried_in(mode))

    @property
    def mode_names(self) -> tuple[str, ...]:
        """The names of the modes in which the option is valid; empty if it is valid in all modes."""
        return () if self.modes is None else names_of_modes(self.modes)

    def help_text(self) -> str:
        """Return the help of the flag, with its modes, limits that are not obvious, and the default if it is None."""
        text = self.help
        if self.mode_names:
            where = [*self.mode_names, *(["--join"] if self.with_join else [])]
            text = f"{', '.join(where)}: {text[0].lower()}{text[1:]}"
        if self.limits not in ("", ">= 0", ">= 1"):
            text += f"  [{self.limits}]"
        default = self.default_text or self.if_none
        return text if default is None else f"{text}  [default: {default}]"


def option(default: Any, help: str, metavar: str | None = None, **attributes: Any) -> Any:
    """Return a field of a dataclass that is an option; ``attributes`` are the attributes of ``OptionInfo``."""
    return dataclasses.field(default=default, metadata={_KEY: OptionInfo(help, metavar, **attributes)})


def info_of(field: dataclasses.Field[Any]) -> OptionInfo:
    """Return the metadata of the option that a field defines."""
    info: OptionInfo = field.metadata[_KEY]
    return info


@dataclass(frozen=True)
class OptionGroup:
    """Base class of dataclasses all of whose fields are options.

    Raises:
        ConfigError: A number is outside of its limits, or a word is not one of the choices; the message states the
            valid values.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        choices_by_name = _choices(kind)
        for field in dataclasses.fields(self):
            value, info = getattr(self, field.name), info_of(field)
            if value is not None and info.limits and not info.accepts(value):
                raise ConfigError(f"{flag(field.name)} is {value}: must be {info.limits}")
            choices = choices_by_name.get(field.name, ())
            if value is not None and choices and value not in choices:
                hint = suggestion(str(value), choices)
                raise ConfigError(f"{flag(field.name)} is {value!r}: must be one of {', '.join(choices)}{hint}")


def names_of(groups: Iterable[type], has_property: Callable[[OptionInfo], object]) -> tuple[str, ...]:
    """Return the names of the options in these groups for whose metadata ``has_property`` is true."""
    return tuple(field.name for group in groups for field in dataclasses.fields(group) if has_property(info_of(field)))


def value_of(name: str) -> Any:
    """Return a property of an ``OptionGroup``: the value of an option or, if that is None, its ``if_none``."""

    def value(group: Any) -> Any:
        own = getattr(group, name)
        return info_of(group.__dataclass_fields__[name]).if_none if own is None else own

    return property(value)


def flag(name: str) -> str:
    """Return the command-line flag of an option or parameter."""
    return "--" + name.replace("_", "-")


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the words that a ``Literal`` of strings allows, with or without None; empty for other types."""
    if typing.get_origin(hint) is Literal:
        words = typing.get_args(hint)
        return words if all(isinstance(word, str) for word in words) else ()
    inner = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return choices_of(inner[0]) if len(inner) == 1 and type(None) in typing.get_args(hint) else ()


@functools.cache
def _choices(group: Any) -> dict[str, tuple[str, ...]]:
    """Return the choices of each option of a group that has choices."""
    hints = typing.get_type_hints(group)
    choices = {
        field.name: info_of(field).choices or choices_of(hints[field.name]) for field in dataclasses.fields(group)
    }
    return {name: words for name, words in choices.items() if words}
