"""How the C library manages the memory of tensors on the CPU."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of mallopt(3)


def keep_freed_memory() -> None:
    """Let this process reuse the memory of freed tensors, instead of returning it to the system. Local.

    It applies to the whole process until it ends, whose memory stays near its peak.

    By default glibc maps new pages for every large tensor, whose page faults take as long as the product that fills
    it: with layers of 4096 x 4096, 17 ms of 50 ms per gradient. Without glibc, nothing changes.
    """
    with suppress(AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
