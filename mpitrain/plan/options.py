"""Generate command-line flags from the types of the run's options and of a job function's parameters."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import click
import docstring_parser

from ..core.toml import read_toml
from ..core.words import nearest, suggestion
from ..errors import ConfigError, JobError
from .config import FIELDS, GROUPS, RunConfig
from .launch_options import LaunchOptions
from .option import OptionGroup, OptionInfo, choices_of, flag, info_of

if typing.TYPE_CHECKING:
    from .job import JobFunction


ParamType: TypeAlias = "click.ParamType[Any]"  # quoted, because older versions of click cannot subscript it


class NonEmptyPath(click.Path):
    """A path; the empty text, which would be the current directory, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail(
                "it is empty: give a path, such as . for this directory (is a shell variable not set?)", param, ctx
            )
        return super().convert(value, param, ctx)


PATH = NonEmptyPath(path_type=Path)
_ARGUMENTS = ("config", "help", "job_file")  # options of every command that has a job


class DescribedOption(click.Option):
    """An option that belongs to a group in the help text.

    Args:
        group: The title of the group; empty for the last group.
        is_common: Whether ``--help`` describes the option, not only ``--help-all``.
    """

    def __init__(self, *args: Any, group: str, is_common: bool, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group, self.is_common = group, is_common


CONFIG = DescribedOption(
    ["--config"],
    type=PATH,
    metavar="FILE",
    default=None,
    help="Read options from a TOML file; flags override it.",
    group="",
    is_common=True,
)


class NearestChoice(click.Choice[str]):
    """A choice that suggests the nearest valid value for a mistyped one."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        message = super().get_invalid_choice_message(value, ctx)
        near = nearest(str(value), [str(choice) for choice in self.choices])
        return f"{message} Did you mean {near!r}?" if near else message


class CommaSeparated(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Comma-separated values, as in ``--hidden-units 100,50``."""

    def __init__(self, item: ParamType) -> None:
        self.item = item
        self.name = f"{item.name},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        values = value.split(",") if isinstance(value, str) and value else value
        if any(isinstance(item, str) and "," in item for item in values):
            self.fail(f"{value!r} has a value with a comma", param, ctx)
        return [self.item.convert(item, param, ctx) for item in values]


def examples(*commands: str) -> str:
    """Return the end of a command's help text: examples of its use."""
    return "\n".join(["\b", f"Example{'s' * (len(commands) > 1)}:", *(f"  {command}" for command in commands)])


def run_options(**defaults: Any) -> list[click.Option]:
    """Return an option for each field of ``RunConfig``'s groups; ``defaults`` override the fields' defaults."""
    return [option for group in GROUPS for option in options_of(group, **defaults)]


def options_of(kind: type, **defaults: Any) -> list[click.Option]:
    """Return a flag for each option of a dataclass; ``defaults`` override the fields' defaults."""
    hints, group = typing.get_type_hints(kind), inspect.cleandoc(kind.__doc__ or "").partition("\n")[0].rstrip(".")
    return [
        _option(field.name, hints[field.name], defaults.get(field.name, field.default), info_of(field), group)
        for field in dataclasses.fields(kind)
    ]


def run_config(values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with these options of a run; options that are None have their defaults.

    Raises:
        ConfigError: An option is unknown, or its value is not valid.
    """
    known = run_options()
    for name in values:
        if name not in FIELDS:
            raise ConfigError(f"no option {name!r}{suggestion(name, FIELDS)}")
    return RunConfig.of(**convert_values(known, {n: value for n, value in values.items() if value is not None}))


def without_overridden(options: Mapping[str, Any], overriding: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without those that other options exclude, such as steps in place of epochs."""
    excluded = {info_of(FIELDS[name]).excludes for name in overriding if name in FIELDS}
    return {name: value for name, value in options.items() if name not in excluded}


def convert_values(options: Iterable[click.Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return Python values as the command line would pass them to these options, by name.

    Strings are read as on the command line. An option that may be repeated takes a string, a list, or a dict.

    Raises:
        ConfigError: A value is not valid; the message names it and the valid values.
    """
    known = {str(option.name): option for option in options}
    converted = {}
    for name, value in values.items():
        try:
            converted[name] = convert(known[name], value)
        except click.BadParameter as error:
            raise ConfigError(f"{name}={value!r}: {error.message}") from error
    return converted


def convert(option: click.Option, value: Any) -> Any:
    """Return a Python value as the command line would pass it to an option.

    Raises:
        click.BadParameter: The value is not valid.
    """
    if option.multiple:
        return _texts(value)
    if option.is_flag:
        if not isinstance(value, bool):
            raise click.BadParameter("must be True or False")
        return value
    if isinstance(value, (list, tuple)) and isinstance(option.type, CommaSeparated):
        return option.type.convert([_convert_one(option.type.item, item) for item in value], option, None)
    return _convert_one(option.type, value)


def _convert_one(kind: ParamType, value: Any) -> Any:
    if isinstance(value, str):
        return kind.convert(value, None, None)
    if not isinstance(value, _python_types(kind)) or (isinstance(value, bool) and kind is not click.BOOL):
        raise click.BadParameter(f"must be {_description(kind)}")
    return kind.convert(value, None, None)


def _python_types(kind: ParamType) -> tuple[type, ...]:
    """Return the types of the values, besides strings, that an option of this type takes."""
    if isinstance(kind, click.Path):
        return (os.PathLike,)
    return {
        click.INT: (numbers.Integral,),
        click.FLOAT: (numbers.Real,),
        click.BOOL: (bool,),
        click.STRING: (numbers.Real, os.PathLike),
    }.get(kind, ())


def _description(kind: ParamType) -> str:
    if isinstance(kind, click.Choice):
        return f"one of {', '.join(map(str, kind.choices))}"
    return f"a list of {kind.item.name}" if isinstance(kind, CommaSeparated) else f"of type {kind.name}"


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        return tuple(f"{key}={item}" for key, item in value.items())
    if isinstance(value, str):
        return (value,)
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise click.BadParameter("must be a string, a list of strings, or a dict")


def flag_words(values: Mapping[str, Any]) -> list[str]:
    """Return the flags that give these values to options.

    Raises:
        ConfigError: A value cannot be written as a flag.
    """
    return [word for name, value in values.items() for word in _words(name, value)]


def group_words(group: OptionGroup) -> list[str]:
    """Return the flags of the options whose values are not the defaults."""
    words = []
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        values = value if info_of(field).is_repeated else [value] if value != field.default else []
        words += [word for item in values for word in _words(field.name, item)]
    return words


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(name if value else f"no_{name}")]
    if isinstance(value, Mapping) or callable(value):
        raise ConfigError(f"{name}={value!r}: must be a value that {flag(name)} accepts")
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return [f"{flag(name)}={text}"] if text.startswith("-") else [flag(name), text]


def job_options(path: Path, function: JobFunction) -> list[click.Option]:
    """Return an option for each parameter of a job function, with help from its docstring, in the job's group.

    Raises:
        JobError: A parameter's type cannot be parsed from a flag, its annotation cannot be read, or its name is an
            option of every run.
    """
    documentation = docstring_parser.parse(inspect.getdoc(function) or "")
    described = {p.arg_name: p.description or "" for p in documentation.params}
    summary = (documentation.short_description or "").rstrip(".")
    group = f"Options of the job ({summary})" if summary else "Options of the job"
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise JobError(f"the annotations of 'job' in {path} cannot be read: {error}") from error
    reserved = {*FIELDS, *(field.name for field in dataclasses.fields(LaunchOptions)), *_ARGUMENTS}
    options = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in reserved:
            raise JobError(
                f"parameter {name!r} of 'job' in {path} is an option of every run: rename it; "
                "defaults for batch_size, train_steps and train_epochs are set in Job(...)"
            )
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        hint = hints.get(name, str if default is None else type(default))
        required = parameter.default is inspect.Parameter.empty
        try:
            info = OptionInfo(described.get(name, ""), is_common=True)
            options.append(_option(name, hint, default, info, group, required))
        except TypeError as error:
            raise JobError(f"parameter {name!r} of 'job' in {path} {error}") from error
    return options


def read_config_file(path: Path, options: list[click.Option]) -> dict[str, Any]:
    """Read options from a TOML file with tables ``run`` and ``job``, such as a run's ``config.toml``; convert them.

    Raises:
        ConfigError: The file cannot be read, names an unknown option, or has a value that is not valid.
    """
    tables = read_toml_option(path, "--config")
    for name, table in tables.items():
        if name not in ("run", "job", "versions", "data") or not isinstance(table, dict):
            raise ConfigError(f"--config {path}: {name!r} must be in a table [run] or [job]")
    values = {**tables.get("run", {}), **tables.get("job", {})}
    known = {str(option.name): option for option in options}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"--config {path}: no option {name!r}{suggestion(name, known)}")
        try:
            values[name] = convert(known[name], value)
        except click.BadParameter as error:
            raise ConfigError(f"--config {path}: {name} is {value!r}: {error.message}") from error
    return values


def read_toml_option(path: Path, flag_name: str) -> dict[str, Any]:
    """Read a TOML file given by the flag ``flag_name``.

    Raises:
        ConfigError: The file cannot be read, or is not TOML.
    """
    try:
        return read_toml(path)
    except OSError as error:
        raise ConfigError(f"{flag_name} {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{flag_name} {path}: {error}") from error


def _option(
    name: str, hint: Any, default: Any, info: OptionInfo, group: str = "", required: bool = False
) -> click.Option:
    names = [flag(name), *([info.also] if info.also else []), name]
    # A required option must not pass a default: newer versions of click treat even None as a default.
    attributes: dict[str, Any] = {} if required else {"default": default}
    if hint is bool or hint == (bool | None):
        if info.has_negative:
            names[0] = f"{flag(name)}/{flag('no_' + name)}"
        else:
            attributes["is_flag"] = True
    elif info.is_repeated:
        attributes |= {"multiple": True, "type": click.STRING}
    elif info.choices:
        attributes["type"] = NearestChoice(info.choices)
    else:
        attributes["type"] = _type_of(hint)
    attributes |= {"help": info.help_text(), "metavar": info.metavar, "show_default": default is not None}
    return DescribedOption(names, required=required, group=group, is_common=info.is_common, **attributes)


_TYPES: Mapping[Any, Callable[[], ParamType]] = {
    int: lambda: click.INT,
    float: lambda: click.FLOAT,
    str: lambda: click.STRING,
    bool: lambda: click.BOOL,
    Path: lambda: PATH,
}


def _type_of(hint: Any) -> ParamType:
    if hint in _TYPES:
        return _TYPES[hint]()
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in arguments if a is not type(None)]
        if len(inner) == 1:
            return _type_of(inner[0])
    if choices := choices_of(hint):
        return NearestChoice(choices)
    if origin in (list, tuple) and arguments:
        return CommaSeparated(_type_of(arguments[0]))
    raise TypeError(f"has type {hint}: must be int, float, bool, str, Path, Literal of strings, or a list of these")
