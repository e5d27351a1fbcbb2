"""Batches on their way to a GPU, ahead of the step that needs them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.layout import Array, Shape
from ..data.split import Split
from .device import Gpu
from .stream import Stream, pinned

_PLACES = 2  # one is filled and copied while the GPU computes with the other
_LINE = 256  # bytes: arrays begin on such a border, as memory of the GPU does


class Place:
    """A batch, in pinned memory here and in memory there; copied in one go.

    Attributes:
        number: Of this place among those for batches of the same size.
        examples, labels, position: Here.
        there: The same three on the GPU.
    """

    def __init__(self, gpu: Gpu, number: int, count: int, split: Split) -> None:
        parts: list[tuple[Shape, Any]] = [((1,), np.uint64)]
        parts += [((count, *split.label_shape), split.label_dtype), ((count, *split.shape), split.dtype)]
        nbytes = sum(_room(*part) for part in parts)
        self.number = number
        self.here, self._there = pinned((nbytes,), np.uint8), gpu.empty((nbytes,), np.uint8)
        self.position, self.labels, self.examples = _cut(self.here, parts)
        position, labels, examples = _cut(self._there, parts)
        self.there = examples, labels, position
        self._copied: Any = None
        # The pool may have given what another array had that the GPU still works with.
        self._used: Any = gpu.compute.mark()

    def send(self, copying: Stream, computing: Stream) -> None:
        """Have it copied as soon as the GPU no longer needs what was there, and what is computed next wait for it."""
        copying.after(self._used)
        copying.send(self.here, self._there)
        self._copied = copying.mark(self._copied)
        computing.after(self._copied)

    def used(self, computing: Stream) -> None:
        """Say that all is given to the GPU that needs this batch."""
        self._used = computing.mark(self._used)

    def wait(self) -> None:
        """Return when the memory here may be written."""
        if self._copied is not None:
            self._copied.synchronize()


class Feed:
    """Places of a split's batches, as they are stored: a byte of a picture travels as a byte."""

    def __init__(self, gpu: Gpu, split: Split) -> None:
        self._gpu, self._split = gpu, split
        with gpu.here():
            self._copying = Stream()
        self._places: dict[int, list[Place]] = {}
        self._by_address: dict[int, Place] = {}

    def memory(self, count: int) -> tuple[Array, Array]:
        """Pinned memory for the next batch of ``count`` examples and their labels, as ``Split.read`` takes them.

        Waits until what was in it has been copied.
        """
        place = self._next(count)
        return place.examples, place.labels

    def send(self, examples: Array, labels: Array, position: int) -> Place:
        """Begin to copy a batch, from ``memory`` or from elsewhere; within ``gpu.here()``."""
        place = self._by_address.get(examples.ctypes.data)
        if place is None or len(place.examples) != len(examples):
            place = self._next(len(examples))
            np.copyto(place.examples, examples)
            np.copyto(place.labels, labels)
        place.position[0] = position
        place.send(self._copying, self._gpu.compute)
        return place

    @property
    def nbytes(self) -> int:
        """Bytes of the GPU's memory."""
        return sum(place.here.nbytes for places in self._places.values() for place in places)

    def _next(self, count: int) -> Place:
        places = self._places.get(count)
        if places is None:
            with self._gpu.here():
                places = [Place(self._gpu, number, count, self._split) for number in range(_PLACES)]
            self._places[count] = places
            self._by_address |= {place.examples.ctypes.data: place for place in places}
        places.append(places.pop(0))
        places[-1].wait()
        return places[-1]


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
