"""The folder in which a host keeps the newest state of a run, outside MPI, so that the state survives the ranks.

The folder is in shared memory, and in the temporary directory where shared memory is too small. Its name is a function
of host and run directory, so that a later start can find the folder. Only its owner can access it.

As a script with the arguments ``remove RUN_DIR``, this file removes the folders of a run on this host. The script needs
only Python's standard library.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SHM = Path("/dev/shm")
_OWNER = "run_dir"  # name of the file that contains the path of the run directory


def folders(run_dir: str) -> list[Path]:
    """Return the folders that may hold states of a run on this host, in the order of preference; they may not exist."""
    name = hashlib.sha256(os.fsencode(f"{socket.gethostname()}:{run_dir}")).hexdigest()[:24]
    return [parent / name for parent in _parents()]


def make(folder: Path, run_dir: str) -> None:
    """Create one of the ``folders``.

    Raises:
        OSError: The folder cannot be created, or its parent belongs to another user or is writable by others.
    """
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder.parent):
        raise PermissionError(f"{folder.parent} belongs to another user, or others may write to it")
    folder.mkdir(exist_ok=True)
    (folder / _OWNER).write_text(run_dir)


def existing(run_dir: str) -> list[Path]:
    """Return the ``folders`` that exist and that no other user can have made."""
    return [folder for folder in folders(run_dir) if folder.is_dir() and _is_private(folder.parent)]


def remove(run_dir: str) -> None:
    """Remove the states of a run on this host."""
    for folder in existing(run_dir):
        _remove(folder)


def remove_orphans() -> None:
    """Remove the states of runs whose directory does not exist any more."""
    for parent in filter(_is_private, _parents()):
        with contextlib.suppress(OSError):
            for folder in parent.iterdir():
                with contextlib.suppress(OSError):
                    if not Path((folder / _OWNER).read_text()).is_dir():
                        _remove(folder)


def _parents() -> Iterator[Path]:
    for parent in (_SHM, Path(tempfile.gettempdir())):
        yield parent / f"mpitrain-states-{os.geteuid()}"


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # removes the folder if it is empty


if __name__ == "__main__":
    remove(sys.argv[2])
