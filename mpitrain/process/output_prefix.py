"""Whose words those are: what ranks other than the chief print begins with their rank, under ``mpitrain run``."""

from __future__ import annotations

import io
import sys
from typing import TextIO


class PrefixedStream(io.TextIOBase):
    """Writes whole lines to another stream, each with a prefix.

    Args:
        stream: Where to; lines go there in one piece, so that those of several ranks do not mix.
    """

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream, self._prefix, self._begun = stream, prefix, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        self._put(lines)
        return len(text)

    def flush(self) -> None:
        """Write what is there, be it a line or not."""
        if self._begun:
            self._put([self._begun])
            self._begun = ""
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def _put(self, lines: list[str]) -> None:
        said = "".join(f"{self._prefix}{line}\n" for line in lines if line.strip())
        if said:
            self._stream.write(said)
            self._stream.flush()


def set_output_prefix(rank: int | None) -> None:
    """Have what this process prints begin with its rank; with None as it is, which is the chief's."""
    assert sys.__stdout__ is not None and sys.__stderr__ is not None
    prefix = f"rank {rank}: "
    sys.stdout = sys.__stdout__ if rank is None else PrefixedStream(sys.__stdout__, prefix)
    sys.stderr = sys.__stderr__ if rank is None else PrefixedStream(sys.__stderr__, prefix)
