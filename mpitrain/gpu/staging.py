"""Staging buffers that copy batches to a GPU ahead of the step that needs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.layout import Array, Shape
from .device import Gpu
from .stream import Stream, pinned

Rows = Sequence[tuple[Shape, Any]]
_BUFFERS = 2  # number of buffers: one is filled and copied while the GPU uses the other
_LINE = 256  # bytes: alignment of arrays, the same as for GPU memory


class StagingBuffer:
    """Buffers for the arrays of one batch in pinned host memory and in GPU memory, copied in one operation.

    Attributes:
        index: Index among the buffers for batches of the same size.
        arrays: The batch's arrays in host memory.
        device_arrays: The same arrays on the GPU.
        position, device_position: The batch's position, shape (1,), uint64, in host memory and on the GPU.
        nbytes: Bytes on the GPU.
    """

    def __init__(self, gpu: Gpu, index: int, count: int, rows: Rows) -> None:
        parts: list[tuple[Shape, Any]] = [((1,), np.uint64)]
        parts += [((count, *shape), dtype) for shape, dtype in rows]
        nbytes = sum(_room(*part) for part in parts)
        self.index = index
        self.nbytes = nbytes
        self._host_block, self._device_block = pinned((nbytes,), np.uint8), gpu.empty((nbytes,), np.uint8)
        self.position, *self.arrays = _cut(self._host_block, parts)
        self.device_position, *self.device_arrays = _cut(self._device_block, parts)
        self._copied: Any = None
        # The memory pool may reuse memory of an array that the GPU is still working with.
        self._used: Any = gpu.compute.record()

    def copy_to_device(self, copying: Stream, computing: Stream) -> None:
        """Copy the batch once the GPU no longer uses the previous batch; later computations wait for the copy."""
        copying.wait_event(self._used)
        copying.copy_to_device(self._host_block, self._device_block)
        self._copied = copying.record(self._copied)
        computing.wait_event(self._copied)

    def used(self, computing: Stream) -> None:
        """Record that all work using this batch has been enqueued."""
        self._used = computing.record(self._used)

    def wait(self) -> None:
        """Return when the host memory may be overwritten."""
        if self._copied is not None:
            self._copied.synchronize()


class BatchStager:
    """Staging buffers for batches.

    Args:
        rows: Shape and data type of a row of each array of a batch; a row belongs to one example.
    """

    def __init__(self, gpu: Gpu, rows: Rows) -> None:
        self._gpu, self._rows = gpu, rows
        with gpu.activate():
            self._copying = Stream()
        self._buffers: dict[int, list[StagingBuffer]] = {}
        self._by_address: dict[int, StagingBuffer] = {}

    def memory(self, count: int) -> list[Array]:
        """Return pinned memory for the arrays of the next batch of ``count`` examples.

        Waits until its previous contents have been copied.
        """
        return self._next(count).arrays

    def copy_to_device(self, arrays: Sequence[Array], position: int) -> StagingBuffer:
        """Start copying a batch from ``memory`` or other arrays. Call within ``gpu.activate()``."""
        count = len(arrays[0])
        buffer = self._by_address.get(arrays[0].ctypes.data)
        if buffer is None or len(buffer.arrays[0]) != count:
            buffer = self._next(count)
            for target, array in zip(buffer.arrays, arrays, strict=True):
                np.copyto(target, array)
        buffer.position[0] = position
        buffer.copy_to_device(self._copying, self._gpu.compute)
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory in use."""
        return sum(buffer.nbytes for buffers in self._buffers.values() for buffer in buffers)

    def _next(self, count: int) -> StagingBuffer:
        buffers = self._buffers.get(count)
        if buffers is None:
            with self._gpu.activate():
                buffers = [StagingBuffer(self._gpu, index, count, self._rows) for index in range(_BUFFERS)]
            self._buffers[count] = buffers
            self._by_address |= {buffer.arrays[0].ctypes.data: buffer for buffer in buffers}
        buffers.append(buffers.pop(0))
        buffers[-1].wait()
        return buffers[-1]


def _room(shape: Shape, dtype: Any) -> int:
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // _LINE) * _LINE


def _cut(block: Any, parts: list[tuple[Shape, Any]]) -> list[Any]:
    """Return consecutive arrays in ``block``."""
    found, start = [], 0
    for shape, dtype in parts:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        found.append(block[start : start + nbytes].view(dtype).reshape(shape))
        start += _room(shape, dtype)
    return found
