"""Standard streams that are closed (``command >&-`` in a shell), or that cannot be written (``command | head -1``)."""

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


def discard(stream: TextIO) -> None:
    """Send the buffered output, and everything printed later, to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
