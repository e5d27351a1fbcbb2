"""Values that are a part of the structure: compressed values, and scalars in compressed files."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...core.layout import Array, Shape
from ..structure import Dataset
from .blocks import Read


def stored_values(read: Read, dataset: Dataset) -> Iterator[tuple[tuple[slice, ...], Array]]:
    """Yield index and values of each part of a dataset that is neither empty nor virtual.

    Raises:
        ValueError: The values are not compressed as declared.
    """
    if dataset.place:
        start, stop = dataset.place
        yield (), np.frombuffer(read(start, stop - start), dataset.dtype).reshape(dataset.shape)
    for chunk in dataset.chunks:
        values = _decompress(read(chunk.start, chunk.stop - chunk.start), dataset.chunk_shape, dataset.dtype)
        # The last chunks may extend beyond the dataset.
        sizes = [min(size, n - at) for at, size, n in zip(chunk.first, values.shape, dataset.shape, strict=True)]
        where = tuple(slice(at, at + size) for at, size in zip(chunk.first, sizes, strict=True))
        yield where, values[tuple(slice(size) for size in sizes)]


def _decompress(data: bytes, shape: Shape, dtype: np.dtype[Any]) -> Array:
    """Return the values of a chunk compressed with gzip after shuffling: all first bytes, all second bytes and so on.

    Raises:
        ValueError: The data are not compressed like this, or do not have the given shape.
    """
    count = math.prod(shape)
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(data, count * dtype.itemsize + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(content) != count * dtype.itemsize or not stream.eof or stream.unused_data:
        raise ValueError("of another size")
    shuffled = np.frombuffer(content, np.uint8).reshape(dtype.itemsize, count)
    return np.ascontiguousarray(shuffled.T).view(dtype).reshape(shape)
