"""Leaves out what launchers add when a rank has already said why it ended."""

from __future__ import annotations

import re

_RULE = b"-" * 74  # Open MPI puts its comments between two of these lines
_COMMENTS = re.compile(
    rb"MPI_ABORT was invoked on rank|exited with non-zero status|due to process rank .*\n?.*calling\s+\"abort\""
)
_LINES = re.compile(
    rb"Abort\(\d+\) on node \d+ \(rank \d+ in comm"  # MPICH's and Intel MPI's
    rb"|\[\S+\] PMIX ERROR: PMIX_ERR_UNREACH in file"  # Open MPI's, at times, when ranks end with a status
)

_MARKS = (_RULE, b"Abort(", b"[")  # how lines begin that may be a launcher's


class LauncherFilter:
    """Fed the bytes of a stream, returns those to show.

    Whole lines are judged, but a line that cannot be a launcher's is passed on as it comes: a progress bar
    has no line ends.
    """

    def __init__(self) -> None:
        self._line = b""  # of which nothing has been passed on yet
        self._passing = False  # the current line is being passed on as it comes
        self._block: list[bytes] | None = None

    def feed(self, data: bytes) -> bytes:
        """What of ``data``, and of what was held back, is to be shown now."""
        shown = b""
        for piece in data.splitlines(keepends=True):
            for part in re.split(rb"(?<=\n)", piece):
                shown += self._take(part)
        return shown

    def rest(self) -> bytes:
        """What is held back at the end of the stream."""
        held = b"".join(self._block or []) + self._line
        self._block, self._line = None, b""
        return held

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
        return self._judge(line)

    def _judge(self, line: bytes) -> bytes:
        if line.rstrip() == _RULE:
            if self._block is None:
                self._block = [line]
                return b""
            block, self._block = b"".join([*self._block, line]), None
            return b"" if _COMMENTS.search(block) else block
        if self._block is not None:
            self._block.append(line)
            return b""
        return b"" if _LINES.match(line) else line
