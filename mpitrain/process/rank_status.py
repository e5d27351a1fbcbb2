"""Status files: each rank registers in a directory that ``mpitrain run`` watches, and keeps its current step there.

The launcher can only report that its processes have ended. When a rank dies, the user needs the number, the activity
and the host of the rank. These data must be on disk before the death, because a killed process cannot write any more. A
file is one line: the step, and the other values as JSON. The step is written through a memory map, in less than a
microsecond.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import shutil
import socket
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from ..core import activity
from .pid import pid_start

RUN_DIR_VARIABLE = "MPITRAIN_RUN_DIR"  # the run directory in which the ranks of ``mpitrain run`` register
_FOLDER = ".ranks"
_ACTIVITY, _FAILED = "activity-", "failed"  # names of the files that reapers write
_TRACEBACK = "traceback-"
WARNED = "warned-"  # prefix of the names of files for warnings that a rank has printed
_IMPORTED = "import-"  # prefix of the names of files for modules that ranks use
MEETING = "meeting-"  # prefix of the name of the folder in which the ranks of a program find each other
_STEP_DIGITS = 19
_SIZE = 4096
_LONGEST_ERROR = 1000
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank.

    Attributes:
        start: Start time of the rank's process, which distinguishes processes that have the same id.
        role: ``worker`` or ``ps``; empty before roles are assigned.
        task: The rank's index among the ranks of that role.
        reaper: Process id of the launcher's child: the reaper, or its parent (see ``reaper.survive_hydra``).
        ready: Whether a signal makes the rank save and exit, instead of killing it.
        is_training: Whether the rank has begun to train or to serve; true for a program from its start.
        error: The exception with which the rank ended; empty if there is none.
        is_user_error: Whether this exception is a user error, which the rank prints itself.
        hang: The activity in which the rank made no progress, so that its reaper ended it.
        done: Whether the rank has finished training and written everything.
        stopped: Whether the rank finished before the last step.
        ended_at: When the process ended, in seconds since the epoch on its host; 0 if the end was not observed.
        signal, status: The signal that killed the process, 0 for none; its exit status if no signal killed it.
        step: Number of completed steps.
        is_program: Whether the rank runs a program, which need not use this package.
        last_line: The last line on standard error of a program that has exited with a status; empty if it has none.
    """

    rank: int
    host: str
    pid: int
    start: str
    reaper: int = 0
    role: str = ""
    task: int = 0
    ready: bool = False
    is_training: bool = False
    error: str = ""
    is_user_error: bool = False
    hang: str = ""
    done: bool = False
    stopped: bool = False
    ended_at: float = 0.0
    signal: int = 0
    status: int = 0
    step: int = 0
    is_program: bool = False
    last_line: str = ""


@dataclass(frozen=True)
class LongActivity:
    """A long activity of a rank.

    Attributes:
        doing: A description of the activity.
        busy: Whether the rank may soon be done: it neither waits for others nor takes far longer than usual.
    """

    doing: str
    busy: bool


class RankStatusFile:
    """A rank's status file. Every method is local, and a failing disk does not fail the run.

    Args:
        run_dir: The run directory; None if the rank is not watched: nothing is written then.
    """

    def __init__(self, run_dir: Path | None, rank: int) -> None:
        self._new_status = _new_status(rank, os.getpid(), os.getppid())
        self._page: mmap.mmap | None = None
        self._path = None if run_dir is None else folder_of(run_dir) / str(rank)
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(_line(self._new_status))
            with self._path.open("r+b") as file:
                self._page = mmap.mmap(file.fileno(), _SIZE)
        except (OSError, ValueError) as error:  # some file systems do not support memory maps
            _log.debug("%s: %s", self._path, error)

    def set_step(self, step: int) -> None:
        """Record that ``step`` steps are done."""
        activity.set_step(step)
        if self._page is not None:
            self._page[:_STEP_DIGITS] = b"%019d" % step

    def set_role(self, role: str, task: int) -> None:
        self._update(role=role, task=task)

    def set_ready(self) -> None:
        """Record that from now on a signal makes this rank save and exit."""
        self._update(ready=True)

    def set_training(self) -> None:
        """Record that this rank begins to train or to serve."""
        self._update(is_training=True)

    def set_done(self, stopped: bool) -> None:
        """Record that training has ended, and whether it has ended before the last step."""
        activity.become("done")
        self._update(done=True, stopped=stopped)

    def set_failed(self, error: BaseException, is_user_error: bool, traceback: str = "") -> None:
        """Record the error that ends this rank; ``is_user_error``: a ``UserError``, which the rank prints itself."""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        self._update(error=f"{name}: {error}".removesuffix(": ")[:_LONGEST_ERROR], is_user_error=is_user_error)
        if self._path is not None and traceback:
            record_traceback(self._path.parent.parent, self._new_status.rank, traceback)

    def has_lower_rank_failed_alike(self) -> bool:
        """Return whether one of the four lowest ranks, lower than this one, has recorded the same error.

        False if this rank does not see its file.
        """
        own = self._new_status
        files = [] if self._path is None else [self._path.with_name(str(rank)) for rank in range(min(own.rank, 4))]
        return any(other is not None and other.error == own.error for other in map(_read, files))

    def _update(self, **known: object) -> None:
        self._new_status = replace(self._new_status, **known)  # type: ignore[arg-type]
        if self._path is not None:
            _rewrite(self._path, self._new_status)


def is_watched(folder: Path) -> bool:
    """Return whether ``mpitrain run`` watches this run directory. A script may also train in another run directory."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    return run_dir is not None and os.path.realpath(folder) == os.path.realpath(run_dir)


def register_program(run_dir: Path, rank: int, pid: int, reaper: int) -> None:
    """Register the process of a program as a rank; called by its reaper."""
    path = folder_of(run_dir) / str(rank)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        status = _new_status(rank, pid, reaper)
        path.write_bytes(_line(replace(status, is_program=True, ready=True, is_training=True)))


def record_step(run_dir: Path, rank: int, step: int) -> None:
    """Record the number of completed steps; called by the reaper of a program."""
    with contextlib.suppress(OSError), (folder_of(run_dir) / str(rank)).open("r+b") as file:
        file.write(b"%019d" % step)


def record_hang(run_dir: Path, rank: int, pid: int, hang: str) -> None:
    """Record that a rank's process hangs and will be ended; called by its reaper."""
    path = folder_of(run_dir) / str(rank)
    status = _read(path)
    if status is not None and status.pid == pid:
        _rewrite(path, replace(status, hang=hang))


def record_end(run_dir: Path, rank: int, pid: int, signal: int, exit_status: int, **known: object) -> None:
    """Record how a rank's process ended; called by its reaper.

    Args:
        known: Further values of its ``RankStatus``.
    """
    path = folder_of(run_dir) / str(rank)
    status = _read(path)
    if status is not None and status.pid != pid:
        return  # the status is of another attempt
    if status is None:
        status = _new_status(rank, pid, os.getpid())
        with contextlib.suppress(OSError):
            path.write_bytes(_line(status))
    status = replace(status, **known)  # type: ignore[arg-type]
    _rewrite(path, replace(status, ended_at=time.time(), signal=signal, status=exit_status))


def record_traceback(run_dir: Path, rank: int, traceback: str) -> None:
    """Record the traceback of the exception that ended a rank."""
    with contextlib.suppress(OSError):
        (folder_of(run_dir) / f"{_TRACEBACK}{rank}").write_text(traceback, encoding="utf-8")


def record_activity(run_dir: Path, rank: int, doing: LongActivity | None) -> None:
    """Record a long activity of a rank, None if it makes progress; called by its reaper."""
    text = "" if doing is None else json.dumps(asdict(doing))
    with contextlib.suppress(OSError):
        (folder_of(run_dir) / f"{_ACTIVITY}{rank}").write_text(text, encoding="utf-8")


def read_activities(run_dir: Path) -> dict[int, LongActivity]:
    """Return the long activities of ranks; the others make progress."""
    activities = {}
    for path in folder_of(run_dir).glob(f"{_ACTIVITY}*"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # for example an empty file
            activities[int(path.name.removeprefix(_ACTIVITY))] = LongActivity(
                **json.loads(path.read_text(encoding="utf-8"))
            )
    return dict(sorted(activities.items()))


def read_tracebacks(run_dir: Path) -> dict[int, str]:
    """Return the tracebacks that ranks have recorded, by rank."""
    tracebacks = {}
    for path in folder_of(run_dir).glob(f"{_TRACEBACK}*"):
        with contextlib.suppress(OSError, ValueError):
            tracebacks[int(path.name.removeprefix(_TRACEBACK))] = path.read_text(encoding="utf-8")
    return tracebacks


def record_failed(run_dir: Path) -> None:
    """Record that a signal has killed a rank, or that a program has failed; called by the reaper."""
    with contextlib.suppress(OSError):
        (folder_of(run_dir) / _FAILED).touch()


def any_failed(run_dir: Path) -> bool:
    """Return whether ``record_failed`` was called; quick."""
    return os.path.exists(folder_of(run_dir) / _FAILED)


def age_s(run_dir: Path) -> float | None:
    """Return the age in seconds of the oldest status file, plus a minute; None if there is no status file."""
    with contextlib.suppress(OSError):
        return time.time() - min(path.stat().st_mtime for path in folder_of(run_dir).iterdir()) + 60.0
    return None


def folder_of(run_dir: Path) -> Path:
    """Return the directory of the ranks' status files in a run directory."""
    return run_dir / _FOLDER


def read(run_dir: Path) -> list[RankStatus]:
    """Return the status of all registered ranks, in rank order."""
    statuses = []
    with contextlib.suppress(OSError):  # the folder is being removed
        statuses = [_read(path) for path in folder_of(run_dir).glob("[0-9]*")]
    return sorted((status for status in statuses if status is not None), key=lambda status: status.rank)


def record_import(run_dir: Path, module: str) -> None:
    """Record that ranks use a module, for ``imports`` on hosts that have no rank yet."""
    with contextlib.suppress(OSError):
        (folder_of(run_dir) / f"{_IMPORTED}{module}").touch()


def imports(run_dir: Path) -> list[str]:
    """Return the modules that ``record_import`` has recorded."""
    return [path.name.removeprefix(_IMPORTED) for path in folder_of(run_dir).glob(f"{_IMPORTED}*")]


def clear(run_dir: Path) -> None:
    """Remove the status files, and the other files of ranks and reapers beside them."""
    folder = folder_of(run_dir)
    with contextlib.suppress(OSError):  # a reaper may still be writing
        for path in folder.iterdir():
            if path.name.startswith((_FAILED, _ACTIVITY, _TRACEBACK, WARNED, _IMPORTED)) or path.name.isdecimal():
                path.unlink(missing_ok=True)
            elif path.name.startswith(MEETING):
                shutil.rmtree(path, ignore_errors=True)
        folder.rmdir()


def _new_status(rank: int, pid: int, reaper: int) -> RankStatus:
    return RankStatus(rank, socket.gethostname(), pid, pid_start(pid), reaper)


def _read(path: Path) -> RankStatus | None:
    """Return the content of a status file; None if it is incomplete or invalid."""
    try:
        text = path.read_bytes().rstrip(b" \n\0")
        known = json.loads(text[_STEP_DIGITS:])
        known["step"] = int(text[:_STEP_DIGITS])
        return RankStatus(**{f.name: known[f.name] for f in fields(RankStatus)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _rewrite(path: Path, status: RankStatus) -> None:
    """Replace the content of a status file except the step."""
    try:
        with path.open("r+b") as file:
            file.seek(_STEP_DIGITS)
            file.write(_line(status)[_STEP_DIGITS:])
    except OSError as error:
        _log.debug("%s: %s", path, error)


def _line(status: RankStatus) -> bytes:
    known = asdict(status)
    step = known.pop("step")
    error = status.error
    while len(text := json.dumps(known).encode()) > _SIZE - _STEP_DIGITS - 2:  # up to six bytes per character in JSON
        error = known["error"] = error[: len(error) // 2]
    return (b"%019d " % step + text).ljust(_SIZE - 1) + b"\n"
