"""Standard streams that are closed (``command >&-`` in a shell), must not be used, or need a prefix."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


def open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed; call before opening any file.

    A file that is opened later would get the free descriptor, and everything printed would be written to it. Names of
    files are printed whatever bytes they have, and characters that the encoding does not have as escape sequences.
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
        # With ASCII in the C locale, Python handles the bytes of names, but no other characters.
        fails = ("strict", "surrogateescape") if stream.encoding != "utf-8" else ("strict",)
        if isinstance(stream, io.TextIOWrapper) and stream.errors in fails:
            stream.reconfigure(errors="backslashreplace")


def may_read(descriptor: int) -> bool:
    """Return whether this process may read a descriptor: false for its terminal, if the shell reads from that."""
    try:
        return not os.isatty(descriptor) or os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # not the terminal of this session
        return True


def use_null(descriptor: int) -> None:
    """Make a descriptor that of the null device."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)


def discard(stream: TextIO) -> None:
    """Send the buffered output, and everything printed later, to the null device."""
    use_null(stream.fileno())


class _Prefixed(io.RawIOBase):
    """Writes to a descriptor, each line with a prefix; what is written at once stays together."""

    def __init__(self, descriptor: int, prefix: bytes, name: str) -> None:
        self._descriptor, self._prefix, self.name = descriptor, prefix, name
        self._is_within = False  # whether the beginning of the line has been written

    def write(self, data: Any) -> int:
        text = bytes(data)
        if text:
            first = b"" if self._is_within else self._prefix
            view = memoryview(first + text[:-1].replace(b"\n", b"\n" + self._prefix) + text[-1:])
            while view:
                view = view[os.write(self._descriptor, view) :]
            self._is_within = not text.endswith(b"\n")
        return len(text)

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True


def _prefixed(stream: TextIO, prefix: str) -> TextIO:
    """Return a stream to the same file, each of whose lines begins with a prefix."""
    stream.flush()
    raw = _Prefixed(stream.fileno(), prefix.encode(), stream.name)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True)


def set_output_prefix(rank: int | None) -> None:
    """Prefix this process's output with its rank; None, for the chief, removes the prefix."""
    assert sys.__stdout__ is not None and sys.__stderr__ is not None
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    if rank is not None:
        sys.stdout, sys.stderr = (_prefixed(stream, f"rank {rank}: ") for stream in (sys.stdout, sys.stderr))
