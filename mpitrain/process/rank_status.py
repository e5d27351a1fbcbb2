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
class Entry:
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
    attendant: int = 0
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


class Presence:
    """A rank's own entry; every method is local, and none fails a run whose disk does.

    Args:
        run_dir: The run directory; None where nobody watches, and nothing is written.
    """

    def __init__(self, run_dir: Path | None, rank: int) -> None:
        self._entry = _entry(rank, os.getpid(), os.getppid())
        self._page: mmap.mmap | None = None
        self._path = None if run_dir is None else folder_of(run_dir) / str(rank)
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(_line(self._entry))
            with self._path.open("r+b") as file:
                self._page = mmap.mmap(file.fileno(), _SIZE)
        except (OSError, ValueError) as error:  # some file systems map no files
            _log.info("%s: %s", self._path, error)

    def at(self, step: int) -> None:
        """Say that ``step`` steps are done."""
        if self._page is not None:
            self._page[:_STEP_DIGITS] = b"%019d" % step

    def takes_role(self, role: str, task: int) -> None:
        self._say(role=role, task=task)

    def is_ready(self) -> None:
        """Say that from here on a signal has this rank save and end."""
        self._say(ready=True)

    def is_done(self, stopped: bool) -> None:
        """Say that training has come to its end, and whether that was before the last step."""
        self._say(done=True, stopped=stopped)

    def failed(self, error: BaseException, mistake: bool) -> None:
        """Say what ended this rank."""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        self._say(error=f"{name}: {error}"[:_LONGEST_ERROR], mistake=mistake)

    def _say(self, **known: object) -> None:
        self._entry = replace(self._entry, **known)  # type: ignore[arg-type]
        if self._path is not None:
            _rewrite(self._path, self._entry)


def note_end(run_dir: Path, rank: int, pid: int, signal: int, status: int) -> None:
    """Note how a rank's process ended; by the process that waited for it."""
    path = folder_of(run_dir) / str(rank)
    entry = _read(path)
    if entry is not None and entry.pid != pid:
        return  # another attempt's
    if entry is None:
        entry = _entry(rank, pid, os.getpid())
        with contextlib.suppress(OSError):
            path.write_bytes(_line(entry))
    _rewrite(path, replace(entry, ended_at=time.time(), signal=signal, status=status))


def folder_of(run_dir: Path) -> Path:
    """Where the ranks of a run directory sign in."""
    return run_dir / _FOLDER


def read(run_dir: Path) -> list[Entry]:
    """Who has signed in, by rank."""
    found = [_read(path) for path in folder_of(run_dir).glob("[0-9]*")]
    return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.rank)


def clear(run_dir: Path) -> None:
    """Forget who was there."""
    folder = folder_of(run_dir)
    with contextlib.suppress(OSError):  # an attendant may be writing there still
        for path in folder.glob("[0-9]*"):
            path.unlink(missing_ok=True)
        folder.rmdir()


def _entry(rank: int, pid: int, attendant: int) -> Entry:
    return Entry(rank, socket.gethostname(), pid, pid_start(pid), attendant)


def _read(path: Path) -> Entry | None:
    """What a file says; None where it is being written, or is no entry."""
    try:
        text = path.read_bytes().rstrip(b" \n\0")
        known = json.loads(text[_STEP_DIGITS:])
        known["step"] = int(text[:_STEP_DIGITS])
        return Entry(**{f.name: known[f.name] for f in fields(Entry)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _rewrite(path: Path, entry: Entry) -> None:
    """Replace what a file says, but for the step."""
    try:
        with path.open("r+b") as file:
            file.seek(_STEP_DIGITS)
            file.write(_line(entry)[_STEP_DIGITS:])
    except OSError as error:
        _log.info("%s: %s", path, error)


def _line(entry: Entry) -> bytes:
    known = asdict(entry)
    step = known.pop("step")
    error = entry.error
    while len(text := json.dumps(known).encode()) > _SIZE - _STEP_DIGITS - 2:  # JSON may take six bytes a character
        error = known["error"] = error[: len(error) // 2]
    return (b"%019d " % step + text).ljust(_SIZE - 1) + b"\n"
