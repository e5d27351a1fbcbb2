from __future__ import annotations

import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import current

TOTAL = int(os.environ.get("SIMULATED_GPU_BYTES", 1 << 30))
USED_BY_OTHERS = int(os.environ.get("SIMULATED_GPU_BYTES_USED", 0))


class OutOfMemoryError(MemoryError):
    pass


allocated: dict[int, int] = {}  # the end of each range of device memory, by its start


def is_on_device(address: int) -> bool:
    return any(start <= address < end for start, end in allocated.copy().items())


class MemoryPool:
    """Counts bytes. Freed bytes stay in the pool for later arrays."""

    def __init__(self, allocator: Callable[[int], None] | None = None) -> None:
        self.limit, self.used, self.freed = 0, 0, 0

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        self.limit = size if size is not None else int((fraction or 0) * TOTAL)

    def get_limit(self) -> int:
        return self.limit

    def total_bytes(self) -> int:
        return self.used + self.freed

    def used_bytes(self) -> int:
        return self.used

    def free_bytes(self) -> int:
        return self.freed

    def free_all_blocks(self) -> None:
        self.freed = 0

    def malloc(self, size: int) -> None:
        self.used += size

    def _release(self, size: int) -> None:
        self.used -= size
        self.freed += size


_pools: dict[int, MemoryPool] = defaultdict(MemoryPool)
_here = threading.local()


def pool() -> MemoryPool:
    return _pools[current()]


def is_own_pool() -> bool:
    """Return whether this thread allocates from a separate pool, which a captured graph can keep."""
    return getattr(_here, "allocator", None) is not None


@contextmanager
def using_allocator(allocator: Callable[[int], None]) -> Iterator[None]:
    before, _here.allocator = getattr(_here, "allocator", None), allocator
    try:
        yield
    finally:
        _here.allocator = before


def take(nbytes: int) -> MemoryPool:
    """Allocate bytes from the current device's pool; return the pool."""
    here = pool()
    needed = here.used + max(here.freed, nbytes)
    if needed > TOTAL - USED_BY_OTHERS:
        raise OutOfMemoryError(f"Out of memory allocating {nbytes:,} bytes (allocated so far: {here.used:,} bytes).")
    if here.limit and needed > here.limit:
        raise OutOfMemoryError(
            f"Out of memory allocating {nbytes:,} bytes (allocated so far: {here.used:,} bytes, "
            f"limit set to: {here.limit:,} bytes)."
        )
    here.used, here.freed = here.used + nbytes, max(0, here.freed - nbytes)
    return here


def alloc_pinned_memory(size: int) -> Any:
    return (ctypes.c_char * size)()
