"""Who is there: each rank signs in to a folder that ``mpitrain run`` watches, and keeps in it the step it is in.

The launcher knows of its processes only that they end. What a user asks when one has died, which rank it was, what it
did and where, has to be on a disk by then: a killed process says nothing more. A file is a line: the step, which is
written through a memory map and costs less than a microsecond, and what else is known, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import socket
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from .pid import pid_start

RUN_DIR_VARIABLE = "MPITRAIN_RUN_DIR"  # where ``mpitrain run`` has its ranks sign in
_FOLDER = ".ranks"
_STEP_DIGITS = 19
_SIZE = 4096
_LONGEST_ERROR = 1000
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankStatus:
    """What a rank has said of itself.

    Attributes:
        start: When its process started, which tells two of the same number apart.
        role: ``worker`` or ``ps``, and ``task`` its number among those; empty before roles are given.
        attendant: The process that the launcher started, whose child the rank is.
        ready: Whether a signal has it save and end, in place of ending it.
        error: The unforeseen exception that it ended with.
        mistake: Whether it ended with a user's mistake, which has been told.
        done: Whether it has come to the end of its training, with everything written, and ``stopped`` whether that was
            before the last step.
        ended_at: When the process ended, in seconds since the epoch on its host; 0 where nobody saw it.
        signal, status: How it ended: killed by a signal, 0 for none, or with a status.
        step: Steps done.
    """

    rank: int
    host: str
    pid: int
    start: str
    reaper: int = 0
    role: str = ""
    task: int = 0
    ready: bool = False
    error: str = ""
    mistake: bool = False
    done: bool = False
    stopped: bool = False
    ended_at: float = 0.0
    signal: int = 0
    status: int = 0
    step: int = 0


class RankStatusFile:
    """A rank's own entry; every method is local, and none fails a run whose disk does.

    Args:
        run_dir: The run directory; None where nobody watches, and nothing is written.
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
        except (OSError, ValueError) as error:  # some file systems map no files
            _log.info("%s: %s", self._path, error)

    def set_step(self, step: int) -> None:
        """Say that ``step`` steps are done."""
        if self._page is not None:
            self._page[:_STEP_DIGITS] = b"%019d" % step

    def set_role(self, role: str, task: int) -> None:
        self._say(role=role, task=task)

    def set_ready(self) -> None:
        """Say that from here on a signal has this rank save and end."""
        self._say(ready=True)

    def set_done(self, stopped: bool) -> None:
        """Say that training has come to its end, and whether that was before the last step."""
        self._say(done=True, stopped=stopped)

    def set_failed(self, error: BaseException, mistake: bool) -> None:
        """Say what ended this rank."""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        self._say(error=f"{name}: {error}"[:_LONGEST_ERROR], mistake=mistake)

    def _say(self, **known: object) -> None:
        self._new_status = replace(self._new_status, **known)  # type: ignore[arg-type]
        if self._path is not None:
            _rewrite(self._path, self._new_status)


def record_end(run_dir: Path, rank: int, pid: int, signal: int, exit_status: int) -> None:
    """Note how a rank's process ended; by the process that waited for it."""
    path = folder_of(run_dir) / str(rank)
    status = _read(path)
    if status is not None and status.pid != pid:
        return  # another attempt's
    if status is None:
        status = _new_status(rank, pid, os.getpid())
        with contextlib.suppress(OSError):
            path.write_bytes(_line(status))
    _rewrite(path, replace(status, ended_at=time.time(), signal=signal, status=exit_status))


def folder_of(run_dir: Path) -> Path:
    """Where the ranks of a run directory sign in."""
    return run_dir / _FOLDER


def read(run_dir: Path) -> list[RankStatus]:
    """Who has signed in, by rank."""
    found = [_read(path) for path in folder_of(run_dir).glob("[0-9]*")]
    return sorted((status for status in found if status is not None), key=lambda status: status.rank)


def clear(run_dir: Path) -> None:
    """Forget who was there."""
    folder = folder_of(run_dir)
    with contextlib.suppress(OSError):  # an attendant may be writing there still
        for path in folder.glob("[0-9]*"):
            path.unlink(missing_ok=True)
        folder.rmdir()


def _new_status(rank: int, pid: int, reaper: int) -> RankStatus:
    return RankStatus(rank, socket.gethostname(), pid, pid_start(pid), reaper)


def _read(path: Path) -> RankStatus | None:
    """What a file says; None where it is being written, or is no entry."""
    try:
        text = path.read_bytes().rstrip(b" \n\0")
        known = json.loads(text[_STEP_DIGITS:])
        known["step"] = int(text[:_STEP_DIGITS])
        return RankStatus(**{f.name: known[f.name] for f in fields(RankStatus)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _rewrite(path: Path, status: RankStatus) -> None:
    """Replace what a file says, but for the step."""
    try:
        with path.open("r+b") as file:
            file.seek(_STEP_DIGITS)
            file.write(_line(status)[_STEP_DIGITS:])
    except OSError as error:
        _log.info("%s: %s", path, error)


def _line(status: RankStatus) -> bytes:
    known = asdict(status)
    step = known.pop("step")
    error = status.error
    while len(text := json.dumps(known).encode()) > _SIZE - _STEP_DIGITS - 2:  # JSON may take six bytes a character
        error = known["error"] = error[: len(error) // 2]
    return (b"%019d " % step + text).ljust(_SIZE - 1) + b"\n"
