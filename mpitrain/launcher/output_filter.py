"""Filter out the comments that launchers print when ranks end; mpitrain reports the cause in one line instead.

What ranks write does not pass the filter: it does not pass through the launcher (``launcher/stream_server.py``).
"""

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

_LONGEST_BLOCK = 40  # maximum number of lines of a launcher comment
_KEPT_BYTES = 200_000  # size of the kept end of the output


class LauncherFilter:
    """Takes the lines that a launcher prints, and returns those to show.

    Attributes:
        dropped: The bytes that were filtered out.
        output: The latest bytes, including those that were filtered out.
    """

    def __init__(self) -> None:
        self.dropped, self.output = b"", bytearray()
        self._block: list[bytes] | None = None
        self._blank = b""  # blank lines, dropped if the next line is dropped

    def feed(self, lines: bytes) -> bytes:
        """Return what to show now, of complete lines, or of a part of a line."""
        lines = lines.replace(b"\0", b"")  # Open MPI ends its comments with a null byte
        self.output += lines
        del self.output[:-_KEPT_BYTES]
        shown = b""
        for line in filter(None, re.split(rb"(?<=\n)", lines)):
            part = self._classify(line)
            if part == b"\n":
                self._blank += part
            elif part:
                shown += self._blank + part
                self._blank = b""
        return shown

    def rest(self) -> bytes:
        """Return the bytes that are still held back at the end of the stream."""
        shown, self._blank, self._block = self._blank + b"".join(self._block or []), b"", None
        return shown

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
        return self._drop(line) if _LINES.match(line.rstrip(b"\n")) else line

    def _drop(self, text: bytes) -> bytes:
        self.dropped += text
        self._blank = b""
        return b""
