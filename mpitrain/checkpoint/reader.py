"""Read checkpoints, which may come from untrusted sources.

Digests are verified before any structure is interpreted, the structure is validated before any of it is used, and
values are verified before they are returned. The HDF5 library is used only by a child process (``isolation``), for
``verify_structure`` and for files of earlier versions.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np

from ..core.layout import Array
from ..errors import DamagedCheckpoint
from .container import memory_file, read_chunks
from .digest import Digest, bytes_of, digest_of
from .isolation import structure_in_child
from .manifest import HEAD, DamagedManifest, Manifest, Range, block_bytes
from .structure import Dataset, Structure, UnsupportedStructure, Value
from .validation import check, check_shards

_CHUNK = 1 << 23  # size of a read; with smaller reads the kernel reads ahead less
_VERIFY_CHUNK = 1 << 21  # values that are read twice stay in the cache
_FINITE_CHUNK = 1 << 20  # fits into the L2 cache; smaller chunks cost more than they save
# Files larger than this need 1 byte on disk per 64 bytes of length: reading holes of a sparse file would take hours.
_MAX_SPARSE_BYTES, _MAX_SPARSENESS = 1 << 26, 64


class Checkpoint:
    """An open checkpoint. Its structure is verified and validated on opening; values are verified as they are read.

    Opens no other files than the shards of a sharded checkpoint, which are in the same directory.

    Args:
        path: The checkpoint; may be a symbolic link.
        is_shard: Whether it is a shard, which may neither be a symbolic link nor have shards.

    Attributes:
        attributes: Attributes of the root and of every group, by path: "/", "run/config" and so on.
        datasets: Shapes, dtypes and storage by path, such as ``params/dense1.weight``.
        identity: Digest of the manifest, which covers everything else; files with different contents differ in it.

    Raises:
        DamagedCheckpoint: The file cannot be read, is not a checkpoint, or is damaged.
    """

    def __init__(self, path: Path, *, is_shard: bool = False) -> None:
        self.path = path
        self._shards: dict[str, Checkpoint] = {}  # by file name
        with ExitStack() as resources:
            self._descriptor = _open_regular(path, os.O_NOFOLLOW if is_shard else 0)
            resources.callback(os.close, self._descriptor)
            self._open(resources)
            self._pool = ThreadPoolExecutor(2, "checkpoint-reader")
            resources.callback(self._pool.shutdown, cancel_futures=True)
            self._open_shards(is_shard, resources)
            self._resources = resources.pop_all()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._resources.close()

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return int(self.attributes["/"]["step"])

    def read(self, name: str) -> Array:
        """Return the values of a dataset.

        Raises:
            DamagedCheckpoint: The values are damaged.
        """
        stored = self.datasets[name]
        out = np.empty(stored.shape, stored.dtype)
        self.read_into({name: out})
        return out

    def read_into(self, wanted: Mapping[str, Array]) -> None:
        """Read datasets into arrays of the same shape; values are converted if the dtype differs.

        Raises:
            DamagedCheckpoint: The values are damaged; the content of the arrays is then undefined.
        """
        reads: list[Future[None]] = []
        of_shards: dict[str, dict[str, Array]] = {name: {} for name in self._shards}
        for name, out in wanted.items():
            dataset = self.datasets[name]
            if dataset.dtype != out.dtype or not out.flags.c_contiguous:
                out[...] = self.read(name)
            elif name in self._ranges:
                reads += self._start_reading(name, bytes_of(out))
            else:
                reads.append(self._pool.submit(self._read_stored, name, out))
            for rows in dataset.virtual:
                of_shards[rows.file][name] = out[rows.lo : rows.hi]
        for shard, values in of_shards.items():
            self._shards[shard].read_into(values)
        for read in reads:
            read.result()

    def verify(self) -> list[str]:
        """Read and verify all values; return the names of datasets with values that are not finite.

        Raises:
            DamagedCheckpoint: Some values are damaged.
        """
        checks = [
            (name, self._pool.submit(self._verify_range, name, part))
            for name, ranges in self._ranges.items()
            for part in ranges
        ]
        checks += [
            (name, self._pool.submit(self._verify_stored, name)) for name in self.datasets if name not in self._ranges
        ]
        not_finite = {name for name, finite in checks if not finite.result()}
        for shard in self._shards.values():
            not_finite.update(shard.verify())
        return [name for name in self.datasets if name in not_finite]

    def verify_structure(self) -> None:
        """Verify that other programs, which do not know the manifest, see the same arrays and attributes.

        Starts a process; ranks of some MPI libraries must not do this.

        Raises:
            DamagedCheckpoint: The manifest differs from the HDF5 structure, or HDF5 cannot read the structure.
        """
        described = Structure(self.attributes, self.datasets)
        if self._manifest.structure is not None and self._hdf5_structure() != described:
            raise self._damaged(
                "the names, shapes, attributes or offsets in its manifest differ from its HDF5 structure"
            )
        for shard in self._shards.values():
            shard.verify_structure()

    def _open(self, resources: ExitStack) -> None:
        try:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            manifest = self._read_manifest()
            self._memory = resources.enter_context(memory_file())
            self._copy_rest(manifest)
            self._describe(manifest)
            self._check_name()
        except (DamagedManifest, UnsupportedStructure) as error:
            raise self._damaged(str(error)) from error
        except OSError as error:  # for example because too many files are open
            raise DamagedCheckpoint(f"{self.path} cannot be read: {error.strerror}") from error

    def _read_manifest(self) -> Manifest:
        block = block_bytes(os.pread(self._descriptor, HEAD, 0))
        status = os.fstat(self._descriptor)
        size, on_disk = status.st_size, 512 * status.st_blocks  # some file systems do not count blocks
        self._on_disk = (status.st_dev, status.st_ino), on_disk or size
        if size > _MAX_SPARSE_BYTES and 0 < on_disk < size // _MAX_SPARSENESS:
            raise DamagedManifest(f"it is sparse: only {on_disk:,} of {size:,} bytes are on disk")
        if block > size:
            raise DamagedManifest(f"it ends after {size:,} bytes, inside the manifest")
        front = os.pread(self._descriptor, block, 0)
        manifest = Manifest.unpack(front)
        self.identity = digest_of(front)
        if manifest.size != size:
            raise DamagedManifest(f"it has {size:,} bytes, but {manifest.size:,} were written")
        return manifest

    def _copy_rest(self, manifest: Manifest) -> None:
        """Copy the structure to memory, where it cannot change after verification."""
        descriptor, digest = self._memory.fileno(), Digest()
        os.ftruncate(descriptor, manifest.size)
        self._stored_bytes = 0
        for start, stop in manifest.other_ranges():
            at = start
            for chunk in read_chunks(self._descriptor, start, stop):
                digest.add(chunk)
                if chunk.any():  # holes of the file use no memory
                    self._stored_bytes += os.pwrite(descriptor, chunk.data, at)
                at += len(chunk)
        if str(digest) != manifest.rest:
            raise self._damaged("its structure (names, shapes, step, options) is damaged")

    def _describe(self, manifest: Manifest) -> None:
        """Validate the structure in the manifest or, if there is none, the HDF5 structure."""
        self._manifest, self._ranges = manifest, manifest.arrays
        if manifest.structure is None:
            structure = self._hdf5_structure()
        else:
            places = {name: (ranges[0].start, ranges[-1].stop) for name, ranges in manifest.arrays.items()}
            structure = Structure.from_json(manifest.structure, places)
        self._listed = check(structure, manifest, self._stored_bytes)
        self.attributes: dict[str, dict[str, Value]] = structure.groups
        self.datasets: dict[str, Dataset] = structure.datasets

    def _hdf5_structure(self) -> Structure:
        try:
            return structure_in_child(self._memory.fileno(), self._stored_bytes)
        except UnsupportedStructure as error:
            raise self._damaged(str(error)) from error
        except OSError as error:
            raise DamagedCheckpoint(f"{self.path} cannot be compared with HDF5: {error.strerror}") from error

    def _open_shards(self, is_shard: bool, resources: ExitStack) -> None:
        """Open the shards that contain the values of virtual datasets; see ``sharded``."""
        if is_shard and self._listed:
            raise self._damaged("it is a shard, but lists shards of its own")
        for file, identity in self._listed.items():
            try:
                shard = resources.enter_context(Checkpoint(self.path.with_name(file), is_shard=True))
            except DamagedCheckpoint as error:
                raise self._damaged(f"shard {error}") from error
            self._shards[file] = shard
            if shard.identity != identity:
                raise self._damaged(f"its shard {file} belongs to another checkpoint")
        on_disk = dict(shard._on_disk for shard in self._shards.values())  # hard links to the same file count once
        try:
            shards = {file: shard.datasets for file, shard in self._shards.items()}
            check_shards(self.datasets, shards, sum(on_disk.values()))
        except UnsupportedStructure as error:
            raise self._damaged(str(error)) from error

    def _check_name(self) -> None:
        """Check that the file was not renamed: otherwise the run would resume at another step than requested."""
        named = re.fullmatch(r"step-(\d+)\.h5", self.path.name)
        if named and int(named[1]) != self.step:
            raise self._damaged(f"it contains step {self.step:,}; the file was renamed or replaced")

    def _start_reading(self, name: str, out: Array) -> list[Future[None]]:
        """Start reading a dataset's bytes into ``out``, shape (n,) uint8, in threads; return a future per range."""
        first = self._ranges[name][0].start
        return [
            self._pool.submit(self._read_range, name, part, out[part.start - first :]) for part in self._ranges[name]
        ]

    def _read_range(self, name: str, which: Range, out: Array) -> None:
        """Read and verify a range of a dataset, into the front of ``out``, shape (n,) uint8; thread-safe."""
        digest = Digest()
        for at in range(which.start, which.stop, _CHUNK):
            chunk = out[at - which.start : min(at + _CHUNK, which.stop) - which.start]
            self._read_chunk(at, chunk)
            digest.add(chunk)
        self._compare(name, which, digest)

    def _verify_range(self, name: str, which: Range) -> bool:
        """Verify a range of a dataset; return whether all of its values are finite. Thread-safe."""
        digest, dtype, finite = Digest(), self.datasets[name].dtype, True
        room = np.empty(min(_VERIFY_CHUNK, which.stop - which.start), np.uint8)
        for at in range(which.start, which.stop, _VERIFY_CHUNK):
            chunk = room[: min(_VERIFY_CHUNK, which.stop - at)]
            self._read_chunk(at, chunk)
            for lo in range(0, len(chunk), _FINITE_CHUNK):
                values = chunk[lo : lo + _FINITE_CHUNK]
                digest.add(values)  # loads the piece into the cache
                finite = finite and _is_finite(values.view(dtype))
        self._compare(name, which, digest)
        return finite

    def _compare(self, name: str, which: Range, digest: Digest) -> None:
        if str(digest) != which.digest:
            raise self._damaged(f"the values of {name} are damaged")

    def _verify_stored(self, name: str) -> bool:
        """Return whether all values of a dataset that is a part of the structure are finite. Thread-safe."""
        finite = [_is_finite(values) for _, values in self._stored_values(name)]
        return all(finite)

    def _read_stored(self, name: str, out: Array) -> None:
        """Read a dataset that is a part of the structure into ``out``, of its shape and dtype; thread-safe."""
        for where, values in self._stored_values(name):
            out[where] = values

    def _stored_values(self, name: str) -> Iterator[tuple[tuple[slice, ...], Array]]:
        dataset, memory = self.datasets[name], self._memory.fileno()
        if dataset.place:  # a scalar in a compressed file of an earlier version
            start, stop = dataset.place
            yield (), np.frombuffer(os.pread(memory, stop - start, start), dataset.dtype).reshape(dataset.shape)
        try:
            yield from decompressed(memory, dataset) if dataset.chunks else ()
        except ValueError as error:
            raise self._damaged(f"the values of {name} are not compressed as declared") from error

    def _read_chunk(self, start: int, out: Array) -> None:
        done = 0
        try:
            while done < len(out):
                count = os.preadv(self._descriptor, [out[done:].data], start + done)
                if not count:
                    raise self._damaged("it became shorter while it was read")
                done += count
        except OSError as error:
            raise DamagedCheckpoint(f"{self.path} cannot be read: {error.strerror}") from error

    def _damaged(self, why: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self.path} is not a valid checkpoint: {why}")


def _open_regular(path: Path, flags: int) -> int:
    """Open a regular file for reading; never waits for the writer of a named pipe.

    Raises:
        DamagedCheckpoint: It cannot be opened, or is not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError as error:
        link = flags & os.O_NOFOLLOW and error.errno == errno.ELOOP
        raise DamagedCheckpoint(
            f"{path} cannot be read: {'it is a symbolic link' if link else error.strerror}"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedCheckpoint(f"{path} is not a regular file")
    return descriptor


def _is_finite(values: Array) -> bool:
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


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
