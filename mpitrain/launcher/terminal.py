"""The output of a launch: the output of its ranks, and lines of the launcher, which share one terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import IO

from ..monitor.console import print_wrapped

_CLEARED = b"\x1b[2K"
_SHOW_CURSOR = "\x1b[?25h"
# Whether the terminal's last line is the progress bar of a rank, which has no line end. Set by ``forward`` alone.
_bar_is_last = False


def forward(stream: IO[bytes], data: bytes) -> None:
    """Write output of the ranks to a stream."""
    global _bar_is_last
    if data:
        with contextlib.suppress(OSError):  # the terminal is gone, but the ranks' pipe must still be drained
            stream.write(data)
            stream.flush()
            if stream.isatty():
                _bar_is_last = not data.endswith((b"\n", _CLEARED))


def say(line: str) -> None:
    """Print a message of the launcher on standard error, below the progress bar if there is one.

    The bar of a rank that was killed has not ended its line, and hides the cursor.
    """
    with contextlib.suppress(OSError):  # the terminal is gone
        if sys.stderr.isatty():
            sys.stderr.write(_SHOW_CURSOR + "\n" * _bar_is_last)
        print_wrapped(f"mpitrain: {line}")
