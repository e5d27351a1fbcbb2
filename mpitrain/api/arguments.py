"""Keyword arguments as command-line flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from ..errors import ConfigError
from ..plan.option import flag


def split_words(options: Sequence[click.Option], values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return keyword arguments as flags: those of a command's options, and all others, which are a job's parameters.

    True and False select ``--name`` and ``--no-name``; None leaves an option at its default. Lists and tuples are the
    values of options that take several, and a dict those of ``env``.

    Raises:
        ConfigError: A value cannot be a flag.
    """
    known = {str(option.name): option for option in options}
    own: list[str] = []
    of_job: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        option = known.get(name)
        if option is None:
            of_job += _words(name, value)
        elif option.is_flag and not option.secondary_opts:
            own += [option.opts[0]] if value else []
        elif option.multiple and isinstance(value, (str, list, tuple, Mapping)):
            pairs = [f"{key}={item}" for key, item in value.items()] if isinstance(value, Mapping) else value
            own += [f"{flag(name)}={item}" for item in ([pairs] if isinstance(pairs, str) else pairs)]
        else:
            own += _words(name, value)
    return own, of_job


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else flag(f"no_{name}")]
    if isinstance(value, (list, tuple)):
        return [f"{flag(name)}={','.join(map(str, value))}"]
    if isinstance(value, Mapping) or callable(value):
        raise ConfigError(f"{name}={value!r}: must be a value that {flag(name)} accepts")
    return [f"{flag(name)}={value}"]
