"""Site defaults for ``mpitrain submit``: a TOML file of flags for every job of a site."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ...core.words import suggestion
from ...errors import ConfigError
from ...plan.options import convert, read_toml_option

VARIABLE = "MPITRAIN_SITE"
_COMMAND_LINE_ONLY = ("site", "dry_run", "follow", "sweep")


def places(environ: Mapping[str, str]) -> list[Path]:
    """Return the default paths of the site file, the user's own first."""
    config = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "/nonexistent")) / ".config")
    return [Path(config) / "mpitrain" / "site.toml", Path("/etc/mpitrain/site.toml")]


def find_site(requested: Path | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the site file: as requested, else ``$MPITRAIN_SITE``, else the first default path that exists."""
    if requested is not None:
        return requested
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE])
    return next((path for path in places(environ) if path.is_file()), None)


def read_site(path: Path, options: Sequence[click.Option]) -> dict[str, Any]:
    """Return the values in a site file, converted, by option name.

    Raises:
        ConfigError: The file cannot be read, a key is not a flag of ``mpitrain submit``, or a value is not valid.
    """
    known = {str(option.name): option for option in options if option.name not in _COMMAND_LINE_ONLY}
    values = {}
    for key, value in read_toml_option(path, "--site").items():
        name = key.replace("-", "_")
        if name not in known:
            hint = suggestion(name, known, "; give flags of mpitrain submit, such as partition")
            raise ConfigError(f"--site {path}: no option {key!r}{hint}")
        try:
            values[name] = convert(known[name], value)
        except click.BadParameter as error:
            raise ConfigError(f"--site {path}: {key} is {value!r}: {error.message}") from error
    return values
