"""Memory through which the processes of a rank pass batches to the rank without copies.

Each buffer is an anonymous file (``memfd_create``), inherited by the processes that the rank forks. The memory needs no
space in /dev/shm. The kernel frees it when the last process that has opened it ends, in any way.

    rank                            process
    take a free buffer ── number ─► make a batch in it, or write its arrays to it
    view them      ◄── sizes ────── (the file grows when needed)
    ...
    the last view ends: free
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.layout import Array, Shape

_ALIGNMENT = 64  # size of a cache line in bytes


class BufferWriter:
    """Writes the arrays of a batch to a buffer.

    Args:
        memory: Returns the memory of the buffer, given the number of bytes that it must have.
    """

    def __init__(self, memory: Callable[[int], mmap.mmap]) -> None:
        self._memory, self._end = memory, 0
        self._ranges: dict[int, tuple[int, int]] = {}  # ranges of arrays in the buffer, by their addresses

    def allocate(self, shape: Shape, dtype: Any) -> Array:
        """Return an array in the buffer, which ``write`` need not copy."""
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            return np.empty(shape, dtype)
        start, stop = self._next(math.prod(shape) * dtype.itemsize)
        array = np.frombuffer(self._memory(stop), np.uint8)[start:stop].view(dtype).reshape(shape)
        self._ranges[array.ctypes.data] = start, stop
        return array

    def write(self, arrays: Sequence[pickle.PickleBuffer]) -> list[tuple[int, int]]:
        """Copy arrays that are not in the buffer to it; return where each starts and ends, in bytes."""
        return [self._written(array.raw()) for array in arrays]

    def _written(self, content: memoryview) -> tuple[int, int]:
        ends = self._ranges.get(np.frombuffer(content, np.uint8).ctypes.data)
        if ends is None or ends[1] - ends[0] != content.nbytes:
            ends = start, stop = self._next(content.nbytes)
            self._memory(stop)[start:stop] = content
        return ends

    def _next(self, size: int) -> tuple[int, int]:
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        self._end = start + size
        return start, self._end


class SharedBuffers:
    """Buffers of a rank and the processes that it forks after making this object.

    Args:
        count: Number of buffers.
    """

    def __init__(self, count: int) -> None:
        self._files = [os.memfd_create("mpitrain-batch", os.MFD_CLOEXEC) for _ in range(count)]
        self._maps: dict[int, mmap.mmap] = {}  # memory maps of this process
        self._free = list(range(count))

    def take(self) -> int | None:
        """Return the number of a free buffer, which then is taken; None if all are taken. In the rank."""
        return self._free.pop() if self._free else None

    def give_back(self, number: int) -> None:
        """Declare a buffer free. In the rank."""
        self._free.append(number)

    def writer(self, number: int) -> BufferWriter:
        """Return an object that writes to a buffer. In a process that makes batches."""
        return BufferWriter(lambda end: self._enlarged(number, end))

    def _enlarged(self, number: int, end: int) -> mmap.mmap:
        if end > os.fstat(self._files[number]).st_size:
            os.ftruncate(self._files[number], end)
        return self._map(number, end)

    def view(self, number: int, ranges: Sequence[tuple[int, int]]) -> list[Array]:
        """Return the arrays in a buffer as bytes, without a copy. In the rank.

        The buffer is free when the last object that refers to the arrays is deleted.
        """
        memory = np.frombuffer(self._map(number, max(stop for _, stop in ranges)), np.uint8)
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
