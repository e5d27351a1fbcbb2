"""The run directory: a new one of a run's own, and the folders that are made for one."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable
from pathlib import Path

from ..errors import LaunchError


def new_run_dir(name: str) -> Path:
    """A folder of this run's own, made here: two runs may begin in the same second.

    Raises:
        LaunchError: It cannot be made.
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
    """A folder and those above it, as far as they are not there: what making it would make, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, innermost first, but what is not empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def cannot_write(folder: Path, error: OSError) -> LaunchError:
    """What is told of a run directory that cannot be written."""
    return LaunchError(f"the run directory {folder} cannot be written: {error.strerror}; give another --run-dir")
