"""The output of a program: its lines are printed with the rank, and written to the rank's log."""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

_KEPT_BYTES = 65_536  # size of the kept end of the standard error
_LONGEST_LINE = 200  # maximum number of characters of a quoted line
_LONGEST_PART = 1 << 20  # maximum number of bytes of a line that are held back; a longer line is split
_PART_S = 0.03  # time after which the beginning of a line is printed without the rest
_SILENCE_S = 1.0  # time without output after which that of a process that has ended is complete
_POLL_S = 0.05
# A progress bar, whose line has not ended, may stand before it.
_TRACEBACK = re.compile(r"(?:^|\r[^\r\n]*)(Traceback \(most recent call last\):)$", re.MULTILINE)
# The prefix of each line of a traceback in a process group.
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(?::.*)?$")


class RankOutput:
    """Copies a program's standard output and standard error to the streams of this process, and to a log file.

    Call ``start`` after the fork, in the parent, and ``redirect`` in the child.

    Args:
        prefix: The beginning of every printed line. An incomplete line is printed after a moment.
        log: The log file, to which the output is appended; if it cannot be written, the output is only printed.
        on_terminal: Whether only the last state of a line that rewrites itself, such as a progress bar, is printed if
            there is a prefix, which the other states would overwrite.
    """

    def __init__(self, prefix: str, log: Path, on_terminal: bool = False) -> None:
        self._prefix, self._log, self._lock = os.fsencode(prefix), log, threading.Lock()
        self._shows_last_state = bool(prefix) and on_terminal
        self._pipes = [os.pipe(), os.pipe()]
        self._threads: list[threading.Thread] = []
        self._log_file = -1
        self._kept = b""  # the latest standard error
        self._active_at = 0.0
        self._writing: set[int] = set()  # the streams that are being written

    def redirect(self) -> None:
        """Make this process, which becomes the program, write to the pipes."""
        for descriptor, (_, pipe) in enumerate(self._pipes, start=1):
            os.dup2(pipe, descriptor)

    def start(self, heading: str) -> None:
        """Begin to copy; the log begins with a heading."""
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._log_file = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError:  # for example a full disk; the output is still printed
            self._log_file = -1
        if self._log_file >= 0:
            _write(self._log_file, os.fsencode(f"{heading}\n"))
        for descriptor, (source, pipe) in enumerate(self._pipes, start=1):
            os.close(pipe)
            thread = threading.Thread(target=self._copy, args=(source, descriptor), daemon=True)
            thread.start()
            self._threads.append(thread)

    def wait(self, silence_s: float = _SILENCE_S, is_over: Callable[[], bool] = lambda: False) -> None:
        """Copy the remaining output, until it ends, is silent, or ``is_over``: other processes may keep a pipe open.

        Waits for as long as the reader of the output accepts nothing.
        """
        self._active_at = time.monotonic()
        for thread in self._threads:
            while thread.is_alive() and not is_over():
                if not self._writing and time.monotonic() >= self._active_at + silence_s:
                    return
                thread.join(_POLL_S)

    @property
    def is_open(self) -> bool:
        """Whether a process can still write."""
        return any(thread.is_alive() for thread in self._threads)

    @property
    def traceback(self) -> str:
        """The last Python traceback on standard error; empty if there is none."""
        text = _TORCH_PREFIX.sub("", self._kept.decode(errors="replace"))
        starts = [match.start(1) for match in _TRACEBACK.finditer(text)]
        return text[starts[-1] :].strip() if starts else ""

    @property
    def last_line(self) -> str:
        """The last line on standard error that is not from this package; empty if there is none."""
        lines = [line.strip() for line in self._kept.decode(errors="replace").splitlines()]
        lines = [line[:_LONGEST_LINE] for line in lines if line and not line.startswith("mpitrain: ")]
        return lines[-1] if lines else ""

    def _copy(self, source: int, descriptor: int) -> None:
        """Copy whole lines, so that lines do not mix: Python may write the end of a line alone."""
        line, is_within = b"", False  # the beginning of a line that is held back; whether an earlier part was printed
        while True:
            holds = self._shows_last_state and b"\r" in line
            if line and not holds and not select.select([source], [], [], _PART_S)[0]:
                self._put(descriptor, line, is_within)
                line, is_within = b"", True
            data = os.read(source, 65_536)
            if not data:
                break
            if descriptor == 2:
                self._kept = (self._kept + data)[-_KEPT_BYTES:]
            held = line + data
            end = held.rfind(b"\n") + 1 if len(held) < _LONGEST_PART else len(held)
            lines, line = held[:end], held[end:]
            if lines:
                self._put(descriptor, lines, is_within)
                is_within = not lines.endswith(b"\n")
        self._put(descriptor, line, is_within)

    def _put(self, descriptor: int, data: bytes, is_within: bool) -> None:
        """Write to the log, and print.

        Args:
            is_within: Whether the first line continues a line of which a part was printed.
        """
        with self._lock:
            if self._log_file >= 0:
                _write(self._log_file, data)
        if self._prefix and data:
            lines = data.split(b"\n")
            ended = lines[-1] == b""
            if self._shows_last_state:
                lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
            first = b"" if is_within else self._prefix
            data = first + (b"\n" + self._prefix).join(lines[:-1] if ended else lines) + b"\n" * ended
        self._writing.add(descriptor)
        _write(descriptor, data)
        self._active_at = time.monotonic()
        self._writing.discard(descriptor)


def error_in(traceback: str) -> str:
    """Return the first line of a traceback's exception, such as ``ValueError: no file``; empty if there is none."""
    lines = traceback.splitlines()[1:]
    errors = [line for line in lines if _ERROR.match(line)]
    return errors[0] if errors else ""


def _write(descriptor: int, data: bytes) -> None:
    """Write all data; output that cannot be written is lost, because the program must not wait forever."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except OSError:
            return
