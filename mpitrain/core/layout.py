"""The layout of a flat vector, and its named views for the layers.

Parameters, gradients and optimizer slots are vectors of one layout. First come the trainable parameters, in the order
in which the model declares them. Then comes the state that is not trained by gradients (the running statistics of
BatchNorm). Averaging, sharding, checkpoints and comparisons are arithmetic on ranges.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Kind = Literal["param", "state"]

PAGE = 4096  # bytes

# Groups of arrays of a model that are not in the vectors: buffers of PyTorch modules that are part of ``state_dict``,
# and buffers that are not.
ARRAY_GROUPS = ("buffers", "transient")
ALIGN = 16  # elements: views start on a cache line (64 bytes of float32), so that no two views share a line


def page_aligned(shape: Shape, dtype: Any) -> Array:
    """Return an array of zeros that starts on a page."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(nbytes + PAGE, np.uint8)
    offset = -raw.ctypes.data % PAGE
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


def row_stride(size: int) -> int:
    """Return the stride of an array's rows in elements, such that each row starts on a new page."""
    return -(-size // 1024) * 1024


@dataclass(frozen=True)
class Entry:
    """A named range of the vector.

    Attributes:
        name: Dotted path of the layer and the parameter's own name, such as ``dense1.weight``.
        shape: Shape of the view.
        start: First element in the flat vector.
        kind: ``param`` is updated by the optimizer, ``state`` by adding its increment.
    """

    name: str
    shape: Shape
    start: int
    kind: Kind = "param"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Layout:
    """The position of every name in the flat vector.

    Attributes:
        entries: In the order of the vector.
        n_trained: The optimizer's range of the vector is ``[0, n_trained)``; state follows.
        size: Length of the vector. Alignment gaps are zero.
        aliases: Further names of shared parameters, each with the entry's name.
    """

    entries: tuple[Entry, ...]
    n_trained: int
    size: int
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def pack(cls, declared: Iterable[tuple[str, Shape, Kind]], aliases: Mapping[str, str] | None = None) -> Layout:
        """Return the layout of ``(name, shape, kind)`` tuples, parameters before state."""
        ordered = sorted(declared, key=lambda item: item[2] == "state")
        entries: list[Entry] = []
        start = n_trained = 0
        for name, shape, kind in ordered:
            entry = Entry(name, tuple(shape), start, kind)
            entries.append(entry)
            start = -(-entry.stop // ALIGN) * ALIGN
            if kind == "param":
                n_trained = start
        return cls(tuple(entries), n_trained, start, aliases or {})

    @property
    def n_params(self) -> int:
        """Number of trainable parameters, without alignment gaps."""
        return sum(entry.size for entry in self.entries if entry.kind == "param")

    def gaps(self) -> Array:
        """Return the elements that belong to no entry, shape (n,), int64, ascending."""
        stops = [0, *(entry.stop for entry in self.entries)]
        starts = [*(entry.start for entry in self.entries), self.size]
        ranges = [np.arange(stop, start) for stop, start in zip(stops, starts, strict=True)]
        return np.concatenate(ranges)

    def views(self, flat: Array) -> dict[str, Array]:
        """Return the named views of ``flat``, shape (size,); they share its memory."""
        return {e.name: flat[e.start : e.stop].reshape(e.shape) for e in self.entries}

    def digests(self) -> npt.NDArray[np.uint8]:
        """Return a digest of each entry, shape (n_entries, 16), uint8, to compare layouts between ranks."""
        rows = [
            hashlib.blake2b(repr((e.name, e.shape, e.start, e.kind)).encode(), digest_size=16).digest()
            for e in self.entries
        ]
        return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), 16)
