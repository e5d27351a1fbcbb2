"""Filter out the comments that launchers print when ranks end; mpitrain reports the cause in one line instead."""

from __future__ import annotations

import re

_RULES = (b"-" * 74, b"-" * 60)  # Open MPI encloses its comments in two of these lines
_COMMENTS = re.compile(
    rb"MPI_ABORT was invoked on rank|exited with non-zero status"
    rb"|due to process rank .*\n?.*(?:calling\s+\"abort\"|exiting\s+improperly)"
    rb"|noticed that process rank|Primary job\s+terminated normally|lost (?:communication|connection)"
    rb"|daemon has (?:failed|lost|unexpectedly)|failed to report back after being spawned|has unexpectedly disconnected"
)
_LINES = re.compile(
    rb"Abort\(\d+\) on node \d+ \(rank \d+ in comm"  # MPICH's and Intel MPI's
    rb"|\[\S+\] PMIX ERROR: "  # from Open MPI, sometimes, when ranks exit with a status or are lost
    rb"|\[\S+:\d+\] \*\*\* (?:An error occurred in|reported by|on |Unknown error|MPI_ERRORS_ARE_FATAL|   and MPI)"
    rb"|mpirun\S*: Forwarding signal \d+ to job"
    rb"|\[warn\] Epoll "  # libevent in Open MPI's launcher, when ranks are killed
    rb"|\[\S+\] plm:ssh: Warning: setpgid"
    rb"|\[\S+\] \[\[|\[\S+:\d+\] \S+:\d+ more processes? ha(?:s|ve) sent"
    rb"|\[(?:mpiexec|proxy:)\S*\] "
    rb"|={60,}$|=   (?:BAD TERM|PID \d|RANK \d|EXIT |KILLED BY|CLEANING UP|YOU CAN IGNORE)"
    rb"|YOUR APPLICATION TERMINATED WITH|This typically refers to a problem|Please see the FAQ page for debugging"
)

# A warning from the chief, or from another rank with its number.
_WARNING = re.compile(rb"(rank \d+: )?((?:WARNING|ERROR|CRITICAL): .*)")

# Prefixes of lines that may be filtered.
_MARKS = (
    b"rank ",
    b"WARNING",
    b"ERROR",
    b"CRITICAL",
    *_RULES,
    b"Abort(",
    b"[",
    b"=",
    b"mpirun",
    b"YOUR APPL",
    b"This typ",
    b"Please see",
)


_LONGEST_BLOCK = 40  # maximum number of lines of a launcher comment


class LauncherFilter:
    """Takes the bytes of a stream and returns the bytes to show.

    Lines that may come from the launcher are held back until complete. Other lines are forwarded immediately, because
    a progress bar has no line ends. A warning printed by several ranks is shown once; a warning that the chief printed
    first is shown as often as the chief prints it.

    Attributes:
        dropped: The bytes that were filtered out.
    """

    def __init__(self) -> None:
        self.dropped = b""
        self._line = b""  # incomplete line, held back
        self._passing = False  # the current line is forwarded as it arrives
        self._block: list[bytes] | None = None
        self._warned: dict[bytes, bool] = {}  # for each warning, whether the chief printed it first
        self._blank = b""  # blank lines, dropped if the next line is dropped

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to show now, from ``data`` and from bytes that were held back."""
        shown = b""
        for part in re.split(rb"(?<=\n)", data):
            within = self._passing
            shown_part = self._take(part)
            if shown_part == b"\n" and not within:
                self._blank += shown_part
            elif shown_part:
                shown += self._blank + shown_part
                self._blank = b""
        return shown

    def rest(self) -> bytes:
        """Return the bytes that are still held back at the end of the stream."""
        held = b"".join(self._block or []) + self._line
        shown, self._blank = self._blank + held, b""
        self._block, self._line = None, b""
        return shown

    def _take(self, part: bytes) -> bytes:
        if not part:
            return b""
        ends = part.endswith(b"\n")
        if self._passing:
            self._passing = not ends
            return part
        self._line += part
        if not ends:
            if self._block is not None or any(
                mark.startswith(self._line) or self._line.startswith(mark) for mark in _MARKS
            ):
                return b""
            shown, self._line, self._passing = self._line, b"", True
            return shown
        line, self._line = self._line, b""
        return self._classify(line)

    def _classify(self, line: bytes) -> bytes:
        if line.rstrip() in _RULES:
            if self._block is None:
                self._block = [line]
                return b""
            block, self._block = b"".join([*self._block, line]), None
            return self._drop(block) if _COMMENTS.search(block) else block
        if self._block is not None:
            self._block.append(line)
            if len(self._block) <= _LONGEST_BLOCK:
                return b""
            block, self._block = b"".join(self._block), None
            return block  # the block is no comment of the launcher: a rank printed it
        if (warning := _WARNING.match(line)) is not None:
            repeated, by_chief = warning[2] in self._warned, warning[1] is None
            chief_was_first = self._warned.setdefault(warning[2], by_chief)
            return b"" if repeated and not (by_chief and chief_was_first) else line
        return self._drop(line) if _LINES.match(line.rstrip(b"\n")) else line

    def _drop(self, text: bytes) -> bytes:
        self.dropped += text
        self._blank = b""
        return b""
