"""The run directory: a new one of a run's own."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from .errors import LaunchError


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


def cannot_write(folder: Path, error: OSError) -> LaunchError:
    """What is told of a run directory that cannot be written."""
    return LaunchError(f"the run directory {folder} cannot be written: {error.strerror}; give another --run-dir")
