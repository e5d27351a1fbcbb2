from __future__ import annotations

import ctypes
import mmap
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


class Memory:
    """Memory of the device outside of pools, which other processes can open; see ``runtime.ipcGetMemHandle``."""

    def __init__(self, size: int) -> None:
        take(size)
        self.name = f"/dev/shm/simulated-gpu-{os.getpid()}-{len(shared)}"
        with open(self.name, "w+b") as file:
            file.truncate(max(1, size))
            self._map = mmap.mmap(file.fileno(), max(1, size))
        self.ptr = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.size, self.device_id = size, current()
        shared[self.ptr] = self
        allocated[self.ptr] = self.ptr + size

    def __del__(self) -> None:
        if os is None:  # at the interpreter's exit
            return
        allocated.pop(self.ptr, None)
        if os.path.exists(self.name):
            os.unlink(self.name)


shared: dict[int, Memory] = {}
allocated: dict[int, int] = {}  # the end of each range of device memory, by its start


def is_on_device(address: int) -> bool:
    return any(start <= address < end for start, end in allocated.copy().items())


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.device_id = ptr, size, device_id


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


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
