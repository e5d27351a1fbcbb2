"""A site's defaults for ``mpitrain submit``: a TOML file with the flags that every job there wants."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ...errors import ConfigError
from ...plan.options import nearest, read_toml

VARIABLE = "MPITRAIN_SITE"


def places(environ: Mapping[str, str]) -> list[Path]:
    """Where a site's file is looked for if none is named: the user's own first."""
    config = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "/nonexistent")) / ".config")
    return [Path(config) / "mpitrain" / "site.toml", Path("/etc/mpitrain/site.toml")]


def find_site(given: Path | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The site's file: as given, else as the environment names it, else the first that there is."""
    if given is not None:
        return given
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE])
    return next((path for path in places(environ) if path.is_file()), None)


def read_site(path: Path, options: Sequence[click.Option]) -> dict[str, Any]:
    """The values of a site's file, by the names of options.

    Raises:
        ConfigError: It cannot be read, or names what is no option of ``mpitrain submit``.
    """
    values = read_toml(path, "--site")
    known = [str(option.name) for option in options if option.name not in ("site", "dry_run", "follow", "sweep")]
    found = {}
    for name, value in values.items():
        key = name.replace("-", "_")
        if key not in known:
            near = nearest(key, known)
            raise ConfigError(
                f"--site {path}: no option {name!r}; "
                + (f"did you mean {near!r}?" if near else "the flags of mpitrain submit are valid, such as partition")
            )
        if isinstance(value, dict) or (isinstance(value, list) and key not in ("setup", "sbatch")):
            raise ConfigError(f"--site {path}: {name} is {value!r}; give one value")
        # Only what a command line could say is converted and checked like one.
        found[key] = [str(item) for item in value] if isinstance(value, list) else value
        if not isinstance(value, (list, bool)):
            found[key] = [str(value)] if key in ("setup", "sbatch") else str(value)
    return found
