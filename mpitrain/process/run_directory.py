"""The run directory: create a new one, and remove what stayed empty."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable
from pathlib import Path

from ..errors import LaunchError

# What a run writes, except for checkpoints.
_FILES = ("config.toml", "metrics.jsonl", "status.json", ".status.json.partial", "ranks.txt", "trace.json")
_FOLDERS = ("logs", "tensorboard", ".ranks")


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


def check_files(folder: Path) -> None:
    """Check that writing to a run directory changes no file outside it.

    ``checkpoints`` may be a link, such as to another file system.

    Raises:
        LaunchError: A file or folder that a run writes is a link, or a file is no regular file.
    """
    for name in (*_FILES, *_FOLDERS):
        path = folder / name
        if path.is_symlink():
            raise LaunchError(f"{path} is a link to {os.readlink(path)}; remove it, or pass another --run-dir")
        if path.exists() and not (path.is_file() if name in _FILES else path.is_dir()):
            kind = "regular file" if name in _FILES else "directory"
            raise LaunchError(f"{path} is not a {kind}; remove it, or pass another --run-dir")


def cannot_write(folder: Path, error: OSError) -> LaunchError:
    """Return the error for a run directory that cannot be written."""
    return LaunchError(f"the run directory {folder} cannot be written: {error.strerror}; pass another --run-dir")
