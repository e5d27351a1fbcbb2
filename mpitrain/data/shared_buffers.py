"""Memory through which processes of a rank pass batches to it without copies.

Each buffer is an anonymous file (``memfd_create``), inherited by the processes that the rank forks. It needs no space
in /dev/shm, and the kernel frees it when the last process that has it ends, however that ends.

    rank                            process
    take a free buffer ── number ─► make a batch, write its arrays
    view them      ◄── sizes ────── (the file grows when needed)
    ...
    the last view ends: free
"""

from __future__ import annotations

import mmap
import os
import pickle
import weakref
from collections.abc import Sequence

import numpy as np

from ..core.layout import Array

_ALIGNMENT = 64  # bytes; of a cache line


class SharedBuffers:
    """Buffers of a rank and the processes that it forks after making this object.

    Args:
        count: Number of buffers.
    """

    def __init__(self, count: int) -> None:
        self._files = [os.memfd_create("mpitrain-batch", os.MFD_CLOEXEC) for _ in range(count)]
        self._maps: dict[int, mmap.mmap] = {}  # of this process
        self._free = list(range(count))

    def take(self) -> int | None:
        """Return the number of a free buffer, which then is taken; None if all are. In the rank."""
        return self._free.pop() if self._free else None

    def give_back(self, number: int) -> None:
        """Declare a buffer free. In the rank."""
        self._free.append(number)

    def write(self, number: int, arrays: Sequence[pickle.PickleBuffer]) -> list[tuple[int, int]]:
        """Write arrays to a buffer; return where each starts and ends, in bytes. In a process that makes batches."""
        ranges, end = [], 0
        for array in arrays:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + array.raw().nbytes
            ranges.append((start, end))
        if end > os.fstat(self._files[number]).st_size:
            os.ftruncate(self._files[number], end)
        memory = self._map(number, end)
        for array, (start, stop) in zip(arrays, ranges, strict=True):
            memory[start:stop] = array.raw()
        return ranges

    def view(self, number: int, ranges: Sequence[tuple[int, int]]) -> list[Array]:
        """Return the arrays in a buffer as bytes, without a copy. In the rank.

        The buffer is free when the last object that refers to them has ended.
        """
        memory = np.frombuffer(self._map(number, ranges[-1][1]), np.uint8)
        weakref.finalize(memory, self.give_back, number).atexit = False
        return [memory[start:stop] for start, stop in ranges]

    def close(self) -> None:
        """Close the files; views stay valid."""
        for file in self._files:
            os.close(file)
        self._files, self._free = [], []

    def _map(self, number: int, size: int) -> mmap.mmap:
        """Return the memory of a buffer, at least ``size`` bytes of it."""
        memory = self._maps.get(number)
        if memory is None or len(memory) < size:
            self._maps[number] = memory = mmap.mmap(self._files[number], max(size, 1))
        return memory
