"""Named arrays and attributes as an HDF5 file, written and read beside the HDF5 library.

The library makes, and later reads, only what is not an array's values, and that in memory: it never has the file
itself open. So a full disk or a damaged file cannot upset the library, no lock is asked of a file system that
has none, and values travel between memory and disk as fast as these can.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..core.h5 import h5py
from ..core.layout import Array
from .digest import Digest, bytes_of
from .disk import replacing
from .manifest import Manifest, Range, block_size_for, gaps

Compression = Literal["none", "gzip"]
Attributes = Mapping[str, Mapping[str, Any]]
Places = Mapping[str, tuple[int, int]]

_PIECE = 1 << 19  # bytes digested and then copied, from the second-level cache


def write_container(
    path: Path,
    arrays: Mapping[str, Array],
    attributes: Attributes,
    compression: Compression = "none",
    virtual: Mapping[str, h5py.VirtualLayout] | None = None,
) -> None:
    """Write ``arrays`` as datasets, so that ``path`` holds all of it or does not change.

    Args:
        arrays: C-contiguous, by the dataset's path in the file.
        attributes: Of groups and datasets, by their path; the root's is "/".
        virtual: Datasets whose values are in other files, by path.

    Raises:
        OSError: The disk is full, or the folder cannot be written to.
    """
    with memory_file() as memory, replacing(path) as writer:
        frame = make_frame(memory, arrays, attributes, arrays, compression, virtual or {})
        writer.append(np.zeros(frame.block, np.uint8))
        rest, digests = Digest(), {name: Digest() for name in frame.places}
        for digest, data in _in_order(frame, arrays, rest, digests):
            digest.add(data)  # while it is in the cache for being written
            writer.append(data)
        ranges = {name: [Range(*place, str(digests[name]))] for name, place in frame.places.items()}
        writer.write_front(np.frombuffer(Manifest(frame.block, frame.size, str(rest), ranges).pack(), np.uint8))


@dataclass(frozen=True)
class Frame:
    """An HDF5 file in memory, all but the values that are stored as they are.

    Attributes:
        memory: The file, in which those values and the first block are holes.
        block: Bytes of the first block, which the seal is for.
        size: Bytes of the whole file.
        places: Where the values belong, by the dataset's name: the first byte, and the one behind the last.
    """

    memory: FileIO
    block: int
    size: int
    places: Places

    def rest(self) -> Iterator[tuple[int, Array]]:
        """What the file has behind its first block and beside those values, in order: where, and bytes (n,) uint8."""
        for start, stop in gaps(self.places.values(), self.block, self.size):
            at = start
            for piece in pieces(self.memory.fileno(), start, stop):
                yield at, piece
                at += len(piece)


def make_frame(
    memory: FileIO,
    arrays: Mapping[str, Array],
    attributes: Attributes,
    ranges: Iterable[str],
    compression: Compression = "none",
    virtual: Mapping[str, h5py.VirtualLayout] | None = None,
) -> Frame:
    """Make a file, as ``write_container`` writes it, but for the arrays' values.

    Args:
        memory: An empty file, whoever made it closes it.
        ranges: The name of an array for each range of bytes that gets a digest of its own.
    """
    block = block_size_for(ranges)
    places = _make(memory, block, arrays, attributes, compression, virtual or {})
    size = max([_size(memory), *(stop for _, stop in places.values())])
    return Frame(memory, block, size, places)


def memory_file() -> FileIO:
    """An empty file in memory, of which only what is written takes any."""
    return FileIO(os.memfd_create("mpitrain-checkpoint", os.MFD_CLOEXEC), "r+b")


def _make(
    memory: FileIO,
    block: int,
    arrays: Mapping[str, Array],
    attributes: Attributes,
    compression: Compression,
    virtual: Mapping[str, h5py.VirtualLayout],
) -> Places:
    """Make the file but for values that are stored as they are; tell where these belong."""
    plain: dict[str, h5py.h5d.DatasetID] = {}
    with h5py.File(memory, "w", libver=("earliest", "v110"), userblock_size=block) as file:
        for name, array in arrays.items():
            if compression == "none" and array.size:
                plain[name] = _declare(file, name, array)
            else:
                _store(file, name, array)
        for name, layout in virtual.items():
            file.create_virtual_dataset(name, layout, fillvalue=np.nan)  # which is what shows where a file is missing
        for name, values in attributes.items():
            item = file[name] if name in file else file.create_group(name)
            item.attrs.update(values)
        # Values come last, so that what is needed first when reading lies together in front.
        starts = {name: _allocate(dataset, arrays[name]) for name, dataset in plain.items()}
    return {name: (start, start + arrays[name].nbytes) for name, start in starts.items()}


def _declare(file: h5py.File, name: str, array: Array) -> h5py.h5d.DatasetID:
    """Make a dataset that has no place in the file yet."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    space = h5py.h5s.create_simple(array.shape) if array.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    dataset = h5py.h5d.create(file.id, None, h5py.h5t.py_create(array.dtype, logical=True), space, creation)
    h5py.h5o.link(dataset, file.id, name.encode(), lcpl=links)
    return dataset


def _allocate(dataset: h5py.h5d.DatasetID, array: Array) -> int:
    """Have a dataset take its place in the file, by writing its first value; return where it is."""
    space, one = dataset.get_space(), h5py.h5s.create(h5py.h5s.SCALAR)
    if array.shape:
        space.select_hyperslab((0,) * array.ndim, (1,) * array.ndim)
    dataset.write(one, space, array.reshape(-1)[:1])
    return int(dataset.get_offset())


def _store(file: h5py.File, name: str, array: Array) -> None:
    """Make a dataset, with its values compressed by the library."""
    if array.size and array.shape:
        file.create_dataset(name, data=array, compression="gzip", compression_opts=1, shuffle=True)
    else:
        file[name] = array  # HDF5 cannot cut it into chunks


def _size(memory: FileIO) -> int:
    return os.fstat(memory.fileno()).st_size


def _in_order(
    frame: Frame, arrays: Mapping[str, Array], rest: Digest, digests: Mapping[str, Digest]
) -> Iterator[tuple[Digest, Array]]:
    """All bytes behind the block as they follow each other, in pieces, each with the digest that it belongs to."""
    memory, reached = frame.memory.fileno(), frame.block
    for name, (start, stop) in sorted(frame.places.items(), key=lambda item: item[1]):
        yield from ((rest, piece) for piece in pieces(memory, reached, start))
        values = bytes_of(arrays[name])
        yield from ((digests[name], values[lo : lo + _PIECE]) for lo in range(0, len(values), _PIECE))
        reached = stop
    yield from ((rest, piece) for piece in pieces(memory, reached, frame.size))


def pieces(descriptor: int, start: int, stop: int) -> Iterator[Array]:
    """The bytes [start, stop) of a file, shape (n,) uint8 each; zeros behind its end, as HDF5 leaves them."""
    for lo in range(start, stop, _PIECE):
        count = min(_PIECE, stop - lo)
        yield np.frombuffer(os.pread(descriptor, count, lo).ljust(count, b"\0"), np.uint8)
