"""The run directory: its creation, its checks, and records of the supervising process and a failure."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from ..core.files import replace_file
from ..errors import ConfigError, LaunchError
from .pid import is_alive, pid_start

FAILURE = "failure.json"
# The files that ``check_files`` checks; ``_FOLDERS`` are the folders.
_FILES = f"""
    config.toml metrics.jsonl status.json .status.json.partial ranks.txt trace.json {FAILURE} .{FAILURE}.partial
    .launcher.json .scale.json .scale_answer.json .stop output.log
""".split()
_LAUNCHER = ".launcher.json"
SCALE_REQUEST, SCALE_ANSWER = ".scale.json", ".scale_answer.json"
_STOP_REQUEST = ".stop"
LEARNERS = "learners"  # folder with the run directories of the learners of a run
_FOLDERS = ("logs", "tensorboard", ".ranks")


class LauncherProcess(NamedTuple):
    """A process that supervises the ranks of a run; ``start`` distinguishes processes that have the same id."""

    host: str
    pid: int
    start: str

    @property
    def is_local(self) -> bool:
        """Whether the process runs on this host."""
        return self.host == socket.gethostname()


def make_run_dir(
    name: str, requested: Path | None, join: Path | None = None, element: str = ""
) -> tuple[Path, list[Path]]:
    """Return the run directory, and the folders created for it, innermost first; by default a new run directory.

    Args:
        join: The directory of the run that this one joins as a learner, or None.
        element: The index of this element of a job array, or empty.

    Raises:
        ConfigError: As for ``check_learner_dir``.
        LaunchError: The directory cannot be written, or has links or other files in place of files that a run writes.
    """
    try:
        if requested is not None:
            check_learner_dir(requested, join)
            folder, made = requested, missing_folders(requested)
        elif join is not None:
            parents = missing_folders(join / LEARNERS)
            folder = _new_learner_dir(join, element)
            made = [folder, *parents]
        else:
            folder = _new_run_dir(name)
            made = [folder, folder.parent]
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
        check_files(folder)
    except OSError as error:
        raise cannot_write(requested or join or Path("runs"), error) from error
    return folder, made


def _new_run_dir(name: str) -> Path:
    """Create and return a new run directory; its name is unique even if two runs begin in the same second.

    Raises:
        LaunchError: The directory cannot be created.
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


def _new_learner_dir(run: Path, element: str) -> Path:
    """Return the directory of a learner that joins a run: a new one, or that of an element of a job array.

    Raises:
        LaunchError: The directory cannot be created.
    """
    folder = run / LEARNERS
    try:
        if element:
            (folder / f"task-{element}").mkdir(parents=True, exist_ok=True)
            return folder / f"task-{element}"
        for number in itertools.count():
            with contextlib.suppress(FileExistsError):
                (folder / str(number)).mkdir(parents=True)
                return folder / str(number)
    except OSError as error:
        raise LaunchError(
            f"--join {run}: the directory cannot be written: {error.strerror}; pass another one"
        ) from error
    raise AssertionError


def check_learner_dir(folder: Path, join: Path | None) -> None:
    """Check that a run directory is that of a learner of the run that it joins, if any.

    Raises:
        ConfigError: It is another one.
    """
    if join is not None and folder.resolve().parent != (join / LEARNERS).resolve():
        raise ConfigError(
            f"--run-dir {folder} is not a learner of --join {join}: it must be {join / LEARNERS}/NAME; remove it"
        )


def record_launcher(folder: Path) -> None:
    """Record this process as the one that starts and supervises the ranks of a run."""
    pid = os.getpid()
    content = {"host": socket.gethostname(), "pid": pid, "start": pid_start(pid)}
    (folder / _LAUNCHER).write_text(json.dumps(content) + "\n", encoding="utf-8")


def forget_launcher(folder: Path) -> None:
    """Remove the record of the process that has supervised the ranks."""
    with contextlib.suppress(OSError):
        (folder / _LAUNCHER).unlink()


def launcher_of(folder: Path) -> LauncherProcess | None:
    """Return the process that supervises the ranks of a run; None if there is none, or it has died on this host."""
    try:
        launcher = LauncherProcess(**json.loads((folder / _LAUNCHER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return None if launcher.is_local and not is_alive(launcher.pid, launcher.start) else launcher


def request_stop(run_dir: Path) -> None:
    """Request that a run saves and ends, from any host that sees its directory.

    Raises:
        LaunchError: The directory cannot be written.
    """
    try:
        (run_dir / _STOP_REQUEST).touch()
    except OSError as error:
        raise cannot_write(run_dir, error) from error


def is_stop_requested(run_dir: Path) -> bool:
    """Return whether somebody has requested that a run ends, since it was started."""
    return (run_dir / _STOP_REQUEST).exists()


def forget_stop(run_dir: Path) -> None:
    """Remove the request to end an earlier start of a run; called when a run starts."""
    with contextlib.suppress(OSError):
        (run_dir / _STOP_REQUEST).unlink()


def missing_folders(folder: Path) -> list[Path]:
    """Return the folder and its missing parents, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders that are empty; give the innermost first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def check_files(folder: Path) -> None:
    """Check that files and folders of a run directory are not links, through which a run would change other files.

    ``checkpoints`` may be a link, such as to another file system.

    Raises:
        LaunchError: A file or folder is a link, a file is not a regular file, or a folder is not a directory.
    """
    for name in (*_FILES, *_FOLDERS):
        path = folder / name
        if path.is_symlink():
            target = os.readlink(path)
            raise LaunchError(f"{path} is a symbolic link to {target}; remove the link, or pass another --run-dir")
        if path.exists() and not (path.is_file() if name in _FILES else path.is_dir()):
            kind = "regular file" if name in _FILES else "directory"
            raise LaunchError(f"{path} is not a {kind}; remove it, or pass another --run-dir")


def cannot_write(folder: Path, error: OSError) -> LaunchError:
    """Return the error for a run directory that cannot be written."""
    return LaunchError(f"the run directory {folder} cannot be written: {error.strerror}; pass another --run-dir")


@dataclass(frozen=True)
class Failure:
    """How a run failed.

    Attributes:
        reason: One line: the rank, its host, and what happened.
        rank: The rank that failed first; None if unknown.
        traceback: The traceback of the rank's exception; empty if there is none.
    """

    reason: str
    rank: int | None = None
    traceback: str = ""


def record_failure(run_dir: Path, failure: Failure | None) -> None:
    """Record how a run failed; None removes the record. If the directory cannot be written, nothing happens."""
    with contextlib.suppress(OSError):
        if failure is None:
            (run_dir / FAILURE).unlink(missing_ok=True)
            return
        replace_file(run_dir / FAILURE, f"{json.dumps(asdict(failure))}\n".encode())


def read_failure(run_dir: Path) -> Failure | None:
    """Return how a run failed; None if it did not fail, or has no valid record."""
    try:
        return Failure(**json.loads((run_dir / FAILURE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
