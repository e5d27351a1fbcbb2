"""Compressed values: chunks of an array, each compressed with gzip after shuffling."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import numpy as np

from ..core.layout import Array
from .structure import Dataset


def decompressed(file: int, dataset: Dataset) -> Iterator[tuple[tuple[slice, ...], Array]]:
    """Yield index and values of each chunk of a dataset; ``file`` is the descriptor of its file.

    Raises:
        ValueError: The values are not compressed as declared.
    """
    for where, (start, stop) in zip(np.ndindex(*dataset.grid), dataset.chunks, strict=True):
        values = _decompress(os.pread(file, stop - start, start), dataset)
        first = [index * size for index, size in zip(where, dataset.chunk_shape, strict=True)]
        # The last chunks may extend beyond the dataset.
        index = tuple(slice(at, at + size) for at, size in zip(first, dataset.chunk_shape, strict=True))
        yield index, values[tuple(slice(n - at) for at, n in zip(first, dataset.shape, strict=True))]


def _decompress(data: bytes, dataset: Dataset) -> Array:
    """Return the values of a chunk, in the file all first bytes, all second bytes and so on.

    Raises:
        ValueError: The data are not compressed like this, or do not have the chunk's shape.
    """
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(data, dataset.chunk_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(content) != dataset.chunk_bytes or not stream.eof or stream.unused_data:
        raise ValueError("of another size")
    shuffled = np.frombuffer(content, np.uint8).reshape(dataset.dtype.itemsize, -1)
    return np.ascontiguousarray(shuffled.T).view(dataset.dtype).reshape(dataset.chunk_shape)
