"""Standard streams that are closed (``command >&-`` in a shell), or cannot be written, or need a prefix."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed; call before opening any file.

    A file that is opened later would get the free descriptor, and everything printed would be written to it. Names of
    files are printed whatever bytes they have.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The file gets the lowest free descriptor, which is the closed one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]
    if sys.stderr is None:
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def is_of_foreground(descriptor: int) -> bool:
    """Return whether this process may read a descriptor: false for its terminal, if the shell reads from that."""
    try:
        return not os.isatty(descriptor) or os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # not the terminal of this session
        return True


def discard(stream: TextIO) -> None:
    """Send the buffered output, and everything printed later, to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class PrefixedStream(io.TextIOBase):
    """Writes lines to another stream, each with a prefix.

    Args:
        stream: The destination; lines are written in one call, so that lines of several ranks do not mix.
        prefix: The prefix.
    """

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream, self._prefix, self._held = stream, prefix, ""
        self._is_within = False  # whether the beginning of the line has been written

    def write(self, text: str) -> int:
        self._held += text
        if "\n" in text:
            end = self._held.rindex("\n") + 1
            lines, self._held = self._held[:end], self._held[end:]
            self._put(lines)
        return len(text)

    def flush(self) -> None:
        """Write buffered text, even an incomplete line."""
        held, self._held = self._held, ""
        self._put(held)

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def _put(self, text: str) -> None:
        if text:
            first = "" if self._is_within else self._prefix
            self._is_within = not text.endswith("\n")
            self._stream.write(first + text[:-1].replace("\n", f"\n{self._prefix}") + text[-1])
        self._stream.flush()


def set_output_prefix(rank: int | None) -> None:
    """Prefix this process's output with its rank; None, for the chief, removes the prefix."""
    assert sys.__stdout__ is not None and sys.__stderr__ is not None
    prefix = f"rank {rank}: "
    sys.stdout = sys.__stdout__ if rank is None else PrefixedStream(sys.__stdout__, prefix)
    sys.stderr = sys.__stderr__ if rank is None else PrefixedStream(sys.__stderr__, prefix)
