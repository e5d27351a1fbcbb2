"""Reading TOML files on every supported version of Python."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

loads = tomllib.loads  # returns the tables of a text


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The content is not TOML.
    """
    with path.open("rb") as file:
        return dict(tomllib.load(file))
