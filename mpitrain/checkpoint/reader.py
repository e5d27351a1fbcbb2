"""Read checkpoints: digests are verified before any structure is interpreted or any value is returned."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..core.h5 import h5py
from ..core.layout import Array, Shape
from ..errors import DamagedCheckpoint
from .container import memory_file, read_chunks
from .digest import Digest, bytes_of, digest_of
from .manifest import HEAD, DamagedManifest, Manifest, Range, block_bytes

FORMAT = 2
_CHUNK = 1 << 23  # with smaller reads the kernel reads ahead less


@dataclass(frozen=True)
class DatasetInfo:
    """Shape and dtype of a dataset."""

    shape: Shape
    dtype: np.dtype[Any]


class Checkpoint:
    """An open checkpoint. Its structure is verified on opening; values are verified as they are read.

    Attributes:
        attributes: Attributes of the root and of every group, by path: "/", "run/config" and so on.
        datasets: Shapes and dtypes by path, such as ``params/dense1.weight``.
        identity: Digest of the manifest, which covers everything else; it differs for any other content.

    Raises:
        DamagedCheckpoint: The file cannot be read, is not a checkpoint, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attributes: dict[str, dict[str, Any]] = {}
        self.datasets: dict[str, DatasetInfo] = {}
        self._shards: dict[str, Checkpoint] = {}  # shards, by file name
        self._rows: dict[str, list[tuple[str, int, int]]] = {}  # of virtual datasets: shard, first and last row (excl.)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from error
        try:
            self._open()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._pool = ThreadPoolExecutor(2, "checkpoint-reader")
        try:
            self._open_shards()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        for shard in self._shards.values():
            shard.close()
        self._pool.shutdown(cancel_futures=True)
        self._file.close()
        self._memory.close()
        os.close(self._descriptor)

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
            if self.datasets[name].dtype != out.dtype or not out.flags.c_contiguous:
                out[...] = self.read(name)
            elif name in self._rows:
                for shard, lo, hi in self._rows[name]:
                    of_shards[shard][name] = out[lo:hi]
            elif name in self._ranges:
                reads += self._start_reading(name, bytes_of(out))
            elif out.shape:  # compressed, and verified with the structure
                self._file[name].read_direct(out)
            else:
                out[...] = self._file[name][()]
        for shard, values in of_shards.items():
            self._shards[shard].read_into(values)
        for read in reads:
            read.result()

    def verify(self) -> None:
        """Read and verify all values.

        Raises:
            DamagedCheckpoint: Some values are damaged.
        """
        for read in [read for name in self._ranges for read in self._start_reading(name)]:
            read.result()
        for shard in self._shards.values():
            shard.verify()

    def _open(self) -> None:
        try:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            manifest = self._read_manifest()
        except DamagedManifest as error:
            raise self._damaged(str(error)) from error
        except OSError as error:
            raise DamagedCheckpoint(f"{self.path} cannot be read: {error.strerror}") from error
        self._memory = memory_file()
        try:
            self._copy_rest(manifest)
            self._ranges: Mapping[str, list[Range]] = manifest.arrays
            self._file = h5py.File(self._memory, "r")
            self._list()
            self._check_name()
        except OSError as error:
            self._memory.close()
            raise DamagedCheckpoint(f"{self.path} cannot be read: {error}") from error
        except BaseException:
            self._memory.close()
            raise

    def _read_manifest(self) -> Manifest:
        block = block_bytes(os.pread(self._descriptor, HEAD, 0))
        size = os.fstat(self._descriptor).st_size
        if block > size:
            raise DamagedManifest(f"it ends after {size:,} bytes, inside the manifest")
        front = os.pread(self._descriptor, block, 0)
        manifest = Manifest.unpack(front)
        self.identity = digest_of(front)
        if manifest.size != size:
            raise DamagedManifest(f"it has {size:,} bytes, but {manifest.size:,} were written")
        return manifest

    def _copy_rest(self, manifest: Manifest) -> None:
        """Copy the structure to memory, where it cannot change after it was verified."""
        descriptor, digest = self._memory.fileno(), Digest()
        os.ftruncate(descriptor, manifest.size)
        os.pwrite(descriptor, os.pread(self._descriptor, manifest.block, 0), 0)
        for start, stop in manifest.other_ranges():
            at = start
            for chunk in read_chunks(self._descriptor, start, stop):
                digest.add(chunk)
                at += os.pwrite(descriptor, chunk.data, at)
        if str(digest) != manifest.rest:
            raise self._damaged("its structure (names, shapes, step, options) is damaged")

    def _list(self) -> None:
        def visit(name: str, item: h5py.Group | h5py.Dataset) -> None:
            if isinstance(item, h5py.Group):
                self.attributes[name] = {key: _python(value) for key, value in item.attrs.items()}
            else:
                self.datasets[name] = DatasetInfo(item.shape, item.dtype)

        visit("/", self._file)
        self._file.visititems(visit)

    def _open_shards(self) -> None:
        """Open the shards that contain the values of virtual datasets; see ``sharded``."""
        for file, identity in json.loads(self.attributes["/"].get("parts", "{}")).items():
            try:
                shard = Checkpoint(self.path.with_name(file))
            except DamagedCheckpoint as error:
                raise self._damaged(f"shard {error}") from error
            self._shards[file] = shard
            if shard.identity != identity:
                raise self._damaged(f"its shard {file} belongs to another checkpoint")
        for name in self.datasets if self._shards else ():
            if self._file[name].is_virtual:
                self._rows[name] = [_rows_in(source) for source in self._file[name].virtual_sources()]

    def _check_name(self) -> None:
        """Check that the file was not renamed: the run would resume at another step than requested."""
        named = re.fullmatch(r"step-(\d+)\.h5", self.path.name)
        if named and int(named[1]) != self.step:
            raise self._damaged(f"it contains step {self.step:,}; the file was renamed or replaced")

    def _start_reading(self, name: str, out: Array | None = None) -> list[Future[None]]:
        """Read a dataset's bytes in threads, into ``out``, shape (n,) uint8, or only to verify them."""
        first = self._ranges[name][0].start
        return [
            self._pool.submit(self._read_range, name, each, None if out is None else out[each.start - first :])
            for each in self._ranges[name]
        ]

    def _read_range(self, name: str, which: Range, out: Array | None) -> None:
        """Read and verify a range of a dataset, into the front of ``out``, (n,) uint8, if given; thread-safe."""
        start, stop, written = which
        room = np.empty(min(_CHUNK, stop - start), np.uint8) if out is None else None
        digest = Digest()
        for at in range(start, stop, _CHUNK):
            count = min(_CHUNK, stop - at)
            chunk = room[:count] if room is not None else out[at - start : at - start + count]  # type: ignore[index]
            self._read_chunk(at, chunk)
            digest.add(chunk)
        if str(digest) != written:
            raise self._damaged(f"the values of {name} are damaged")

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


def _rows_in(source: Any) -> tuple[str, int, int]:
    """Return the shard of a part of a virtual dataset, its first row and its last row (exclusive)."""
    first, last = source.vspace.get_select_bounds()
    return source.file_name, int(first[0]), int(last[0]) + 1


def _python(value: Any) -> Any:
    """Convert an attribute to a Python value."""
    if isinstance(value, bytes):
        return value.decode()
    return value.item() if isinstance(value, np.generic) else value
