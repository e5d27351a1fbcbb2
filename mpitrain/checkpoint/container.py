"""Named arrays and attributes as an HDF5 file, with the array values written and read outside the HDF5 library.

The library creates only the structure of the file, in memory; it never opens the file itself. A full disk or a damaged
file therefore cannot cause errors inside the library. No file locks are needed, and values are transferred between
memory and disk at full speed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..core.h5 import h5py
from ..core.layout import Array, Shape
from .digest import Digest, bytes_of
from .disk import DiskWriter, replacing
from .hdf5 import GZIP_LEVEL, chunks_of
from .manifest import Manifest, Range, block_size_for, gaps
from .structure import Attributes, Dataset, Structure

Compression = Literal["none", "gzip"]
Places = Mapping[str, tuple[int, int]]

_CHUNK_BYTES = 1 << 20  # of compressed arrays: few chunks keep the manifest short
_FAR = 10**15  # an offset with more digits than any file needs, to find the length of the manifest
_PIECE = 1 << 19  # bytes per chunk; small enough to stay in the L2 cache between the digest and the copy


def write_container(
    path: Path,
    arrays: Mapping[str, Array],
    attributes: Attributes,
    compression: Compression = "none",
    virtual: dict[str, Dataset] | None = None,
) -> None:
    """Write ``arrays`` as datasets; ``path`` is replaced atomically, or does not change.

    Args:
        path: The file to write.
        arrays: C-contiguous arrays, by the dataset's path in the file.
        attributes: Attributes of groups and datasets, by their path; the root's is "/".
        compression: How to compress the datasets.
        virtual: Datasets with values in other files, by path.

    Raises:
        OSError: The disk is full, or the directory cannot be written.
    """
    with memory_file() as memory, replacing(path) as writer:
        frame = make_frame(memory, arrays, attributes, arrays, compression, virtual or {})
        ranges = frame.write_part(writer, arrays, 0, frame.size)
        frame.write_manifest(writer, [ranges])


@dataclass(frozen=True)
class Frame:
    """The structure of an HDF5 file, in memory: everything except uncompressed values.

    Attributes:
        memory: The file, with holes in place of uncompressed values and of the first block.
        block: Size of the first block in bytes; it is reserved for the manifest.
        size: Size of the file in bytes.
        places: First and last (exclusive) byte of the values, by the dataset's name.
        structure: The part of the structure that the manifest contains, as values for JSON.
    """

    memory: FileIO
    block: int
    size: int
    places: Places
    structure: Mapping[str, Any]

    def rest(self) -> Iterator[tuple[int, Array]]:
        """Yield offset and bytes, shape (n,) uint8, of each chunk outside the first block and the values, in order."""
        for start, stop in gaps(self.places.values(), self.block, self.size):
            at = start
            for chunk in read_chunks(self.memory.fileno(), start, stop):
                yield at, chunk
                at += len(chunk)

    def write_part(self, writer: DiskWriter, arrays: Mapping[str, Array], start: int, stop: int) -> dict[str, Range]:
        """Append bytes [start, stop) of the file; return the ranges of the values in them, by the dataset's name.

        Raises:
            OSError: The bytes cannot be written.
        """
        ranges, reached = {}, start
        for name, (first, last) in sorted(self.places.items(), key=lambda item: item[1]):
            lo, hi = max(start, first), min(stop, last)
            if lo < hi:
                self._append(writer, reached, lo)
                ranges[name] = Range(lo, hi, _append_values(writer, bytes_of(arrays[name])[lo - first : hi - first]))
                reached = hi
        self._append(writer, reached, stop)
        return ranges

    def write_manifest(self, writer: DiskWriter, ranges: Sequence[Mapping[str, Range]]) -> None:
        """Write the manifest into the first block.

        Args:
            writer: Has written the front of the file.
            ranges: The ranges of each part, in the order of the parts.

        Raises:
            OSError: These or earlier bytes cannot be written.
        """
        rest = Digest()
        for _, chunk in self.rest():
            rest.add(chunk)
        of_arrays = {name: [part[name] for part in ranges if name in part] for name in self.places}
        manifest = Manifest(self.block, self.size, str(rest), of_arrays, self.structure)
        writer.write_front(np.frombuffer(manifest.pack(), np.uint8))

    def _append(self, writer: DiskWriter, start: int, stop: int) -> None:
        """Append bytes [start, stop) of the structure."""
        for chunk in read_chunks(self.memory.fileno(), start, stop):
            writer.append(chunk)


def make_frame(
    memory: FileIO,
    arrays: Mapping[str, Array],
    attributes: Attributes,
    ranges: Iterable[str],
    compression: Compression = "none",
    virtual: dict[str, Dataset] | None = None,
) -> Frame:
    """Create the file that ``write_container`` writes, but in memory and without uncompressed values.

    Args:
        memory: An empty file; the caller closes it.
        arrays, attributes, compression, virtual: As for ``write_container``.
        ranges: For each byte range that gets its own digest, the name of its array.
    """
    datasets = {name: _dataset(array, compression) for name, array in arrays.items()} | (virtual or {})
    block = block_size_for(ranges, Structure.of(datasets, attributes).to_json())
    datasets = _make(memory, block, arrays, attributes, datasets)
    places = {name: dataset.place for name, dataset in datasets.items() if dataset.place}
    size = max([_size(memory), *(stop for _, stop in places.values())])
    return Frame(memory, block, size, places, Structure.of(datasets, attributes).to_json())


def memory_file() -> FileIO:
    """Return an empty file in memory; holes in it use no memory."""
    return FileIO(os.memfd_create("mpitrain-checkpoint", os.MFD_CLOEXEC), "r+b")


def _dataset(array: Array, compression: Compression) -> Dataset:
    """Return the dataset that stores an array; of its chunks, only the number is known yet."""
    if compression == "none" or not array.size or not array.shape:  # these cannot be split into chunks
        return Dataset(array.shape, array.dtype)
    chunk = list(array.shape)
    for axis, n in enumerate(chunk):
        chunk[axis] = min(n, max(1, _CHUNK_BYTES // (math.prod(chunk[axis + 1 :]) * array.itemsize)))
    dataset = Dataset(array.shape, array.dtype, chunk_shape=tuple(chunk))
    return replace(dataset, chunks=((_FAR, 2 * _FAR),) * math.prod(dataset.grid))


def _make(
    memory: FileIO, block: int, arrays: Mapping[str, Array], attributes: Attributes, datasets: Mapping[str, Dataset]
) -> dict[str, Dataset]:
    """Create the file without uncompressed values; return the datasets with the places of their values."""
    made = dict(datasets)
    plain: dict[str, h5py.h5d.DatasetID] = {}
    # A multiple of 8 bytes is then between two values of any array, so that several nodes can write parts of the file.
    aligned = {"alignment_threshold": 1, "alignment_interval": 8}
    with h5py.File(memory, "w", libver=("earliest", "v110"), userblock_size=block, **aligned) as file:
        for name, dataset in datasets.items():
            if dataset.virtual:
                layout = _virtual_layout(name, dataset)
                file.create_virtual_dataset(name, layout, fillvalue=np.nan)  # readers see NaN if a file is missing
            elif dataset.chunks:
                made[name] = replace(dataset, chunks=_compress(file, name, arrays[name], dataset.chunk_shape))
            elif arrays[name].size:
                plain[name] = _declare(file, name, arrays[name])
            else:
                file[name] = arrays[name]
        for name, values in attributes.items():
            item = file[name] if name in file else file.create_group(name)
            item.attrs.update(values)
        # Values come last, so that the structure, which is read first, is contiguous.
        for name, stored in plain.items():
            start = _allocate(stored, arrays[name])
            made[name] = replace(datasets[name], place=(start, start + arrays[name].nbytes))
    return made


def _declare(file: h5py.File, name: str, array: Array) -> h5py.h5d.DatasetID:
    """Create a dataset without allocating its storage."""
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


def _virtual_layout(name: str, dataset: Dataset) -> h5py.VirtualLayout:
    layout = h5py.VirtualLayout(dataset.shape, dataset.dtype)
    for rows in dataset.virtual:
        shape = (rows.hi - rows.lo, *dataset.shape[1:])
        layout[rows.lo : rows.hi] = h5py.VirtualSource(rows.file, name, shape, dataset.dtype)
    return layout


def _allocate(dataset: h5py.h5d.DatasetID, array: Array) -> int:
    """Allocate a dataset's storage by writing its first value; return its offset in the file."""
    space, one = dataset.get_space(), h5py.h5s.create(h5py.h5s.SCALAR)
    if array.shape:
        space.select_hyperslab((0,) * array.ndim, (1,) * array.ndim)
    dataset.write(one, space, array.reshape(-1)[:1])
    return int(dataset.get_offset())


def _compress(file: h5py.File, name: str, array: Array, chunks: Shape) -> tuple[tuple[int, int], ...]:
    """Create a dataset with values, which the library compresses; return the places of its chunks."""
    options = {"chunks": chunks, "compression": "gzip", "compression_opts": GZIP_LEVEL, "shuffle": True}
    return chunks_of(file.create_dataset(name, data=array, **options))


def _size(memory: FileIO) -> int:
    return os.fstat(memory.fileno()).st_size


def _append_values(writer: DiskWriter, values: Array) -> str:
    """Append bytes, shape (n,) uint8; return their digest."""
    digest = Digest()
    for lo in range(0, len(values), _PIECE):
        piece = values[lo : lo + _PIECE]
        digest.add(piece)  # loads the piece into the cache, from which it is then written
        writer.append(piece)
    return str(digest)


def read_chunks(descriptor: int, start: int, stop: int) -> Iterator[Array]:
    """Yield the bytes [start, stop) of a file in chunks, shape (n,) uint8; bytes after its end are 0, as in HDF5."""
    for lo in range(start, stop, _PIECE):
        count = min(_PIECE, stop - lo)
        yield np.frombuffer(os.pread(descriptor, count, lo).ljust(count, b"\0"), np.uint8)
