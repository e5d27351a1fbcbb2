from __future__ import annotations

import os
from collections import defaultdict

from . import current

TOTAL = int(os.environ.get("SIMULATED_GPU_BYTES", 1 << 30))


class OutOfMemoryError(MemoryError):
    pass


class MemoryPool:
    def __init__(self) -> None:
        self.limit, self.used = 0, 0

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        self.limit = size if size is not None else int((fraction or 0) * TOTAL)

    def get_limit(self) -> int:
        return self.limit

    def free_all_blocks(self) -> None:
        self.used = 0


_pools: dict[int, MemoryPool] = defaultdict(MemoryPool)


def pool() -> MemoryPool:
    return _pools[current()]


def take(nbytes: int) -> None:
    here = pool()
    if here.limit and here.used + nbytes > here.limit:
        raise OutOfMemoryError(
            f"Out of memory allocating {nbytes:,} bytes (allocated so far: {here.used:,} bytes, "
            f"limit set to: {here.limit:,} bytes)."
        )
    here.used += nbytes
