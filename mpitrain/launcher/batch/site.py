"""Site defaults for ``mpitrain submit``: a TOML file of flags for every job of a site."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ...errors import ConfigError
from ...plan.options import nearest, read_toml_option

VARIABLE = "MPITRAIN_SITE"


def places(environ: Mapping[str, str]) -> list[Path]:
    """Return the default paths of the site file, the user's own first."""
    config = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "/nonexistent")) / ".config")
    return [Path(config) / "mpitrain" / "site.toml", Path("/etc/mpitrain/site.toml")]


def find_site(given: Path | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the site file: as given, else ``$MPITRAIN_SITE``, else the first default path that exists."""
    if given is not None:
        return given
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE])
    return next((path for path in places(environ) if path.is_file()), None)


def read_site(path: Path, options: Sequence[click.Option]) -> dict[str, Any]:
    """Return the values in a site file, by option name.

    Raises:
        ConfigError: The file cannot be read, or has a key that is not a flag of ``mpitrain submit``.
    """
    values = read_toml_option(path, "--site")
    known = [str(option.name) for option in options if option.name not in ("site", "dry_run", "follow", "sweep")]
    found = {}
    for name, value in values.items():
        key = name.replace("-", "_")
        if key not in known:
            near = nearest(key, known)
            raise ConfigError(
                f"--site {path}: no option {name!r}; "
                + (f"did you mean {near!r}?" if near else "give flags of mpitrain submit, such as partition")
            )
        if isinstance(value, dict) or (isinstance(value, list) and key not in ("setup", "sbatch")):
            raise ConfigError(f"--site {path}: {name} is {value!r}: must be one value")
        # Values that could come from a command line become strings, so that click converts and checks them.
        found[key] = [str(item) for item in value] if isinstance(value, list) else value
        if not isinstance(value, (list, bool)):
            found[key] = [str(value)] if key in ("setup", "sbatch") else str(value)
    return found
