"""The structure of a checkpoint as the HDF5 library sees it.

The library crashes or loops on crafted files: ``isolation`` calls ``structure_of`` in a child process.
"""

from __future__ import annotations

import io
import math
from functools import lru_cache
from typing import Any

import numpy as np

from ..core.h5 import h5py
from .structure import DTYPES, Dataset, Rows, Structure, UnsupportedStructure, Value

GZIP_LEVEL = 1
_MAX_DEPTH = 8  # of groups


def structure_of(file: h5py.File) -> Structure:
    """Return the structure of a file.

    Raises:
        UnsupportedStructure: It has links, types or storage that checkpoints do not have.
        OSError, RuntimeError, KeyError, ValueError: HDF5 cannot read it.
    """
    structure = Structure({}, {})
    _add(structure, "/", file["/"], set(), 0)
    return structure


def chunks_of(dataset: h5py.Dataset) -> tuple[tuple[int, int], ...]:
    """Return first and last (exclusive) byte in the file of each chunk, in the order of the chunks' first elements.

    Raises:
        UnsupportedStructure: A chunk is not compressed.
    """
    base = dataset.file.userblock_size if _offsets_are_relative() else 0
    chunks: list[Any] = []
    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(chunks.append)
    else:  # HDF5 before 1.12.3; takes time proportional to the square of the number
        chunks = [dataset.id.get_chunk_info(index) for index in range(dataset.id.get_num_chunks())]
    if any(chunk.filter_mask for chunk in chunks):
        raise UnsupportedStructure(f"a chunk of {dataset.name!r} is not compressed")
    places = sorted((chunk.chunk_offset, base + chunk.byte_offset, chunk.size) for chunk in chunks)
    return tuple((start, start + size) for _, start, size in places)


@lru_cache(maxsize=1)
def _offsets_are_relative() -> bool:
    """Return whether offsets of chunks are relative to the end of the user block, as in HDF5 1.10."""
    content, values = io.BytesIO(), np.arange(8, dtype=np.uint8)
    with h5py.File(content, "w", userblock_size=512) as file:
        start = file.create_dataset("x", data=values, chunks=(8,)).id.get_chunk_info(0).byte_offset
    return content.getvalue()[start : start + 8] != values.tobytes()


def _add(structure: Structure, path: str, item: Any, visited: set[int], depth: int) -> None:
    """Add an object and everything below it; ``visited`` has the addresses of the objects that were added."""
    address = h5py.h5o.get_info(item.id).addr
    if address in visited or depth > _MAX_DEPTH:
        raise UnsupportedStructure(f"{path!r} has two paths, or is in more than {_MAX_DEPTH} groups")
    visited.add(address)
    if isinstance(item, h5py.Dataset):
        structure.datasets[path] = _dataset(path, item)
        return
    if not isinstance(item, h5py.Group):
        raise UnsupportedStructure(f"{path!r} is neither a group nor a dataset")
    structure.groups[path] = {name: _attribute(path, name, item.attrs) for name in item.attrs}
    for name in sorted(item):
        if "/" in name or not isinstance(item.get(name, getlink=True), h5py.HardLink):
            raise UnsupportedStructure(f"{name!r} in {path!r} is a soft or an external link, or contains a slash")
        _add(structure, name if path == "/" else f"{path}/{name}", item[name], visited, depth + 1)


def _attribute(path: str, name: str, attributes: h5py.AttributeManager) -> Value:
    value = attributes[name]
    if isinstance(value, np.generic) and DTYPES.get(value.dtype.name) == value.dtype:
        value = value.item()
    if not isinstance(value, (bool, int, float, str)):
        raise UnsupportedStructure(f"attribute {name!r} of {path!r} is not a number or text")
    return value


def _dataset(path: str, dataset: h5py.Dataset) -> Dataset:
    shape, dtype, creation = dataset.shape, DTYPES.get(dataset.dtype.name), dataset.id.get_create_plist()
    if dtype is None or dataset.id.get_type() != h5py.h5t.py_create(dtype, logical=True) or shape is None:
        raise UnsupportedStructure(f"{path!r} has a dtype or shape that checkpoints do not support")
    filters = [creation.get_filter(index)[::2] for index in range(creation.get_nfilters())]  # numbers and parameters
    layout = creation.get_layout()
    expected = [(h5py.h5z.FILTER_SHUFFLE, (dtype.itemsize,)), (h5py.h5z.FILTER_DEFLATE, (GZIP_LEVEL,))]
    if layout == h5py.h5d.CHUNKED and filters == expected:
        stored = Dataset(shape, dtype, chunk_shape=dataset.chunks, chunks=chunks_of(dataset))
        _find_chunks(dataset, stored)
        return stored
    if layout == h5py.h5d.VIRTUAL and not filters:
        return Dataset(shape, dtype, virtual=tuple(_rows(path, shape, part) for part in dataset.virtual_sources()))
    if layout != h5py.h5d.CONTIGUOUS or creation.get_external_count():
        raise UnsupportedStructure(f"checkpoints do not support the storage of {path!r}")
    start, size = dataset.id.get_offset(), dataset.id.get_storage_size()
    return Dataset(shape, dtype, place=None if start is None or not size else (start, start + size))


def _find_chunks(dataset: h5py.Dataset, stored: Dataset) -> None:
    """Find each chunk as reading does: the index of a crafted file can list chunks that HDF5 does not find.

    Raises:
        OSError, RuntimeError, ValueError: HDF5 does not find a chunk.
    """
    for where in np.ndindex(*stored.grid):
        dataset.id.read_direct_chunk(tuple(index * n for index, n in zip(where, stored.chunk_shape, strict=True)))


def _rows(path: str, shape: tuple[int, ...], part: Any) -> Rows:
    """Return the source of a virtual dataset that is all rows of the dataset of the same name in another file."""
    first, last = part.vspace.get_select_bounds()
    rows = Rows(part.file_name, first[0], last[0] + 1)
    whole = (first[1:], tuple(n + 1 for n in last[1:])) == ((0,) * len(shape[1:]), shape[1:])
    if (
        not whole
        or part.dset_name.strip("/") != path
        or part.src_space.get_select_type() != h5py.h5s.SEL_ALL
        or part.vspace.get_select_npoints() != (rows.hi - rows.lo) * math.prod(shape[1:])
    ):
        raise UnsupportedStructure(f"the shards of {path!r} are malformed")
    return rows
