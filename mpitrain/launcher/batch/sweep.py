"""Sweeps: one run for every combination of the values of some flags."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

import click

from ...batch_systems.job import Point
from ...core.words import nearest
from ...errors import ConfigError
from ...plan.config import GROUPS
from ...plan.option import flag, names_of
from ...plan.options import CommaSeparated

_UNSAFE = re.compile(r"[^A-Za-z0-9._=,+-]+")
_LONGEST = 200  # maximum length of a name in bytes, well below the limit of 255 of most file systems


def combinations(sweeps: Sequence[str], options: Sequence[click.Option]) -> list[Point]:
    """Return every combination of ``NAME=VALUE,VALUE,...``; the last name's values change fastest.

    Args:
        sweeps: The values of ``--sweep``.
        options: The flags that can be swept: the run's and the job's.

    Raises:
        ConfigError: A sweep has no values, an empty value or duplicate values; or its flag cannot be swept, does not
            accept a value, or is given twice.
    """
    known = {str(option.name): option for option in options}
    axes: dict[str, list[Point]] = {}
    for sweep in sweeps:
        name, values = _parse(sweep, known)
        if name in axes:
            raise ConfigError(f"--sweep {name} is given twice; give all values in one --sweep, separated by commas")
        axes[name] = [_point(sweep, known[name], value) for value in values]
    return _with_names([_combined(chosen) for chosen in itertools.product(*axes.values())])


def free_options(sweeps: Sequence[str]) -> list[click.Option]:
    """Return an option for each swept flag of a script or program, whose flags are not known here."""
    names = dict.fromkeys(sweep.partition("=")[0].strip().lstrip("-") for sweep in sweeps)
    return [click.Option([f"--{name}", name.replace("-", "_")]) for name in names if name]


def _combined(points: Sequence[Point]) -> Point:
    """Return the point that has the values of all these points."""
    words = tuple(word for point in points for word in point.words)
    values = {name: value for point in points for name, value in point.values.items()}
    return Point(",".join(point.name for point in points), words, values)


def _parse(sweep: str, known: dict[str, click.Option]) -> tuple[str, list[str]]:
    flag_text, equals, text = sweep.partition("=")
    name = flag_text.strip().lstrip("-").replace("-", "_")
    if not equals or not name or not text:
        raise ConfigError(f"--sweep {sweep}: give a flag's name and values, such as learning_rate=0.1,0.01")
    if name not in known or name in (*names_of(GROUPS, lambda info: info.is_place), "config"):
        near = nearest(name, list(known))
        advice = f"did you mean {near}?" if near and near != name else "--help lists the flags"
        raise ConfigError(f"--sweep {sweep}: {flag(name)} cannot be swept; {advice}")
    # Values of a flag that takes a comma-separated list are separated by semicolons.
    separator = ";" if isinstance(known[name].type, CommaSeparated) else ","
    values = text.split(separator)
    if "" in values:
        raise ConfigError(f"--sweep {sweep}: a value is empty; remove the extra {separator!r}")
    if len(set(values)) < len(values):
        raise ConfigError(f"--sweep {sweep}: a value is given twice; remove the duplicate")
    return name, values


def _point(sweep: str, option: click.Option, value: str) -> Point:
    """Return the point of one value.

    Raises:
        ConfigError: The option does not accept the value.
    """
    try:
        converted = option.type.convert(value, option, None)
    except click.BadParameter as error:
        raise ConfigError(f"--sweep {sweep}: {' '.join(error.message.split())}") from error
    return Point(f"{option.name}={value}", _words(option, value), {str(option.name): converted})


def _words(option: click.Option, value: str) -> tuple[str, ...]:
    if option.is_flag:
        on = bool(click.BOOL.convert(value, option, None))
        return ((option.opts if on else option.secondary_opts)[0],)
    return (f"{option.opts[0]}={value}",)


def _with_names(points: list[Point]) -> list[Point]:
    """Make the points' names valid and unique directory names; number them if they are too long or not unique."""
    names = [_UNSAFE.sub("_", point.name) for point in points]
    if len(set(names)) < len(names) or max(map(len, names)) > _LONGEST:
        names = [f"{index}-{name[:_LONGEST]}" for index, name in enumerate(names)]
    return [replace(point, name=name) for name, point in zip(names, points, strict=True)]
