"""The output of a launch: the output of its ranks, and lines of the launcher, which may share one terminal or file."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from typing import IO

from ..monitor.console import print_wrapped

_CLEARED = b"\x1b[2K"
_SHOW_CURSOR = "\x1b[?25h"
# For each file or terminal whose last line has no end: who wrote it, such as a rank that shows a progress bar.
_unfinished: dict[tuple[int, int], object] = {}
_full: set[tuple[int, int]] = set()  # files that cannot be written, which has been reported


def forward(stream: IO[bytes], data: bytes, writer: object) -> None:
    """Write output to a stream; begin a new line if another writer has not ended its line.

    Args:
        writer: Who has written the output, such as the number of a rank.
    """
    if not data:
        return
    place = _place_of(stream)
    try:
        # Not by the stream's own buffer: a thread that waits in it would abort this process at its exit.
        _write(stream.fileno(), b"\n" + data if _unfinished.get(place, writer) != writer else data)
    except OSError as error:  # the terminal or the reader of a pipe is gone, but the ranks must not wait
        if error.errno not in (errno.EPIPE, errno.EIO) and place not in _full:
            _full.add(place)
            say(f"output of the ranks is lost: {error.strerror}")
        return
    _unfinished.pop(place, None)
    if not data.endswith((b"\n", _CLEARED)):
        _unfinished[place] = writer


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # another program has set the terminal so
            select.select([], [descriptor], [])


def say(line: str) -> None:
    """Print a message of the launcher on standard error, below the progress bar if there is one.

    The bar of a rank that was killed has not ended its line, and hides the cursor.
    """
    with contextlib.suppress(OSError):  # the terminal is gone
        place = _place_of(sys.stderr)
        sys.stderr.write((_SHOW_CURSOR if sys.stderr.isatty() else "") + "\n" * (place in _unfinished))
        _unfinished.pop(place, None)
        print_wrapped(f"mpitrain: {line}")


def _place_of(stream: IO[bytes] | IO[str]) -> tuple[int, int]:
    """Return what two streams to the same file, pipe or terminal have in common."""
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino
