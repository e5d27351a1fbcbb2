"""The run directory: create a new one, and remove what stayed empty."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable
from pathlib import Path

from ..errors import LaunchError


def new_run_dir(name: str) -> Path:
    """Create and return a new run directory; its name is unique even if two runs begin in the same second.

    Raises:
        LaunchError: It cannot be created.
    """
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise cannot_write(folder, error) from error
        return folder
    raise AssertionError


def missing_folders(folder: Path) -> list[Path]:
    """Return the folder and its missing parents, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of the folders that are empty; give the innermost first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def cannot_write(folder: Path, error: OSError) -> LaunchError:
    """Return the error for a run directory that cannot be written."""
    return LaunchError(f"the run directory {folder} cannot be written: {error.strerror}; pass another --run-dir")
