"""Options as dataclass fields. Their metadata gives flags, help and checks."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

_KEY = "option"
_LIMITS = {
    "minimum": (">=", operator.ge),
    "above": (">", operator.gt),
    "maximum": ("<=", operator.le),
    "below": ("<", operator.lt),
}


@dataclass(frozen=True)
class OptionInfo:
    """Metadata of an option: help text, limits and choices.

    Attributes:
        help: What it does, without what follows from the other attributes.
        metavar: What help shows in place of a value; None for the type's name.
        minimum, above, maximum, below: The valid numbers: at least, more than, at most, less than.
        default_text: For an option that is None unless given: its default, or what determines it.
        also: A second spelling of its flag.
        choices: The valid words; empty if the type determines what is valid.
        is_repeated: Whether its flag may be given several times; its value is then a tuple.
        has_negative: Whether a boolean option also has a flag ``--no-NAME``.
    """

    help: str
    metavar: str | None = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    default_text: object = ""
    also: str = ""
    choices: tuple[str, ...] = ()
    is_repeated: bool = False
    has_negative: bool = True

    @property
    def limits(self) -> str:
        """The valid numbers, such as ``> 0 and <= 1``; empty if all are."""
        limits = {name: getattr(self, name) for name in _LIMITS}
        return " and ".join(f"{_LIMITS[name][0]} {limit}" for name, limit in limits.items() if limit is not None)

    def accepts(self, number: float) -> bool:
        """Return whether a number is within the limits."""
        limits = {name: getattr(self, name) for name in _LIMITS}
        return all(_LIMITS[name][1](number, limit) for name, limit in limits.items() if limit is not None)

    def help_text(self, modes: Sequence[str] = ()) -> str:
        """Return the help of its flag, with the limits that are not obvious, and the default if it is None.

        Args:
            modes: The modes in which it is valid, which the text begins with; empty for all.
        """
        text = self.help
        if modes:
            text = f"{', '.join(modes)}: {text[0].lower()}{text[1:]}"
        if self.limits not in ("", ">= 0", ">= 1"):
            text += f"  [{self.limits}]"
        return text + (f"  [default: {self.default_text}]" if self.default_text else "")


def option(default: Any, help: str, metavar: str | None = None, **attributes: Any) -> Any:
    """Return a field of a dataclass that is an option; ``attributes`` are those of ``OptionInfo``."""
    return dataclasses.field(default=default, metadata={_KEY: OptionInfo(help, metavar, **attributes)})


def info_of(field: dataclasses.Field[Any]) -> OptionInfo:
    """Return the metadata of the option that a field defines."""
    info: OptionInfo = field.metadata[_KEY]
    return info


@dataclass(frozen=True)
class OptionGroup:
    """Base class of dataclasses all of whose fields are options.

    Raises:
        ConfigError: A number is outside of its limits; the message says what is valid.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, info = getattr(self, field.name), info_of(field)
            if value is not None and info.limits and not info.accepts(value):
                raise ConfigError(f"{flag(field.name)} is {value}: must be {info.limits}")


def flag(name: str) -> str:
    """Return the command-line flag of an option or parameter."""
    return "--" + name.replace("_", "-")
