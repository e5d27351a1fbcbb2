"""Batches on their way to a GPU, ahead of the step that needs them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.layout import Array, Shape
from ..data.split import Split
from .device import Gpu
from .stream import Stream, pinned

_BUFFERS = 2  # one is filled and copied while the GPU computes with the other
_LINE = 256  # bytes: arrays begin on such a border, as memory of the GPU does


class StagingBuffer:
    """A batch, in pinned memory here and in memory there; copied in one go.

    Attributes:
        index: Of this place among those for batches of the same size.
        examples, labels, position: Here.
        there: The same three on the GPU.
    """

    def __init__(self, gpu: Gpu, index: int, count: int, split: Split) -> None:
        parts: list[tuple[Shape, Any]] = [((1,), np.uint64)]
        parts += [((count, *split.label_shape), split.label_dtype), ((count, *split.shape), split.dtype)]
        nbytes = sum(_room(*part) for part in parts)
        self.index = index
        self.activate, self._device_block = pinned((nbytes,), np.uint8), gpu.empty((nbytes,), np.uint8)
        self.position, self.labels, self.examples = _cut(self.activate, parts)
        position, labels, examples = _cut(self._device_block, parts)
        self.device_arrays = examples, labels, position
        self._copied: Any = None
        # The pool may have given what another array had that the GPU still works with.
        self._used: Any = gpu.compute.record()

    def copy_to_device(self, copying: Stream, computing: Stream) -> None:
        """Have it copied as soon as the GPU no longer needs what was there, and what is computed next wait for it."""
        copying.wait_event(self._used)
        copying.copy_to_device(self.activate, self._device_block)
        self._copied = copying.record(self._copied)
        computing.wait_event(self._copied)

    def used(self, computing: Stream) -> None:
        """Say that all is given to the GPU that needs this batch."""
        self._used = computing.record(self._used)

    def wait(self) -> None:
        """Return when the memory here may be written."""
        if self._copied is not None:
            self._copied.synchronize()


class BatchStager:
    """Places of a split's batches, as they are stored: a byte of a picture travels as a byte."""

    def __init__(self, gpu: Gpu, split: Split) -> None:
        self._gpu, self._split = gpu, split
        with gpu.activate():
            self._copying = Stream()
        self._buffers: dict[int, list[StagingBuffer]] = {}
        self._by_address: dict[int, StagingBuffer] = {}

    def memory(self, count: int) -> tuple[Array, Array]:
        """Pinned memory for the next batch of ``count`` examples and their labels, as ``Split.read`` takes them.

        Waits until what was in it has been copied.
        """
        buffer = self._next(count)
        return buffer.examples, buffer.labels

    def copy_to_device(self, examples: Array, labels: Array, position: int) -> StagingBuffer:
        """Begin to copy a batch, from ``memory`` or from elsewhere; within ``gpu.activate()``."""
        buffer = self._by_address.get(examples.ctypes.data)
        if buffer is None or len(buffer.examples) != len(examples):
            buffer = self._next(len(examples))
            np.copyto(buffer.examples, examples)
            np.copyto(buffer.labels, labels)
        buffer.position[0] = position
        buffer.copy_to_device(self._copying, self._gpu.compute)
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes of the GPU's memory."""
        return sum(buffer.activate.nbytes for buffers in self._buffers.values() for buffer in buffers)

    def _next(self, count: int) -> StagingBuffer:
        buffers = self._buffers.get(count)
        if buffers is None:
            with self._gpu.activate():
                buffers = [StagingBuffer(self._gpu, index, count, self._split) for index in range(_BUFFERS)]
            self._buffers[count] = buffers
            self._by_address |= {buffer.examples.ctypes.data: buffer for buffer in buffers}
        buffers.append(buffers.pop(0))
        buffers[-1].wait()
        return buffers[-1]


def _room(shape: Shape, dtype: Any) -> int:
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // _LINE) * _LINE


def _cut(block: Any, parts: list[tuple[Shape, Any]]) -> list[Any]:
    """Arrays that lie in ``block`` one after the other."""
    found, start = [], 0
    for shape, dtype in parts:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        found.append(block[start : start + nbytes].view(dtype).reshape(shape))
        start += _room(shape, dtype)
    return found
