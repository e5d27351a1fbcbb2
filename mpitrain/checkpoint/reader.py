"""Opens a checkpoint: nothing in it is interpreted, and no value is handed out, before its digest is checked."""

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
from .container import memory_file, pieces
from .digest import Digest, bytes_of, digest_of
from .manifest import HEAD, DamagedManifest, Manifest, Range, block_bytes

FORMAT = 2
_CHUNK = 1 << 23  # smaller reads have the kernel read ahead less


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset of a checkpoint."""

    shape: Shape
    dtype: np.dtype[Any]


class Checkpoint:
    """An open checkpoint, whose structure has been checked; values are checked as they are read.

    Attributes:
        attributes: Of the root and of every group below ``run``, by path: "/", "run/config" and so on.
        datasets: By path, such as ``params/dense1.weight``.
        identity: The digest of the first block, which has those of all else: it is another for any other content.

    Raises:
        DamagedCheckpoint: The file cannot be read, is no checkpoint, or is not as it was written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attributes: dict[str, dict[str, Any]] = {}
        self.datasets: dict[str, DatasetInfo] = {}
        self._parts: dict[str, Checkpoint] = {}  # by their files' names
        self._rows: dict[str, list[tuple[str, int, int]]] = {}  # of virtual datasets: part, first row, the one behind
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from error
        try:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self._open()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._pool = ThreadPoolExecutor(2, "checkpoint-reader")
        try:
            self._open_parts()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        for part in self._parts.values():
            part.close()
        self._pool.shutdown(cancel_futures=True)
        self._file.close()
        self._memory.close()
        os.close(self._descriptor)

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.attributes["/"]["step"])

    def read(self, name: str) -> Array:
        """The values of a dataset.

        Raises:
            DamagedCheckpoint: They are not as they were written.
        """
        stored = self.datasets[name]
        out = np.empty(stored.shape, stored.dtype)
        self.fill({name: out})
        return out

    def fill(self, wanted: Mapping[str, Array]) -> None:
        """Fill arrays, each of its dataset's shape; converted where the type is another.

        Raises:
            DamagedCheckpoint: The values are not as they were written; the arrays then hold anything.
        """
        reads: list[Future[None]] = []
        of_parts: dict[str, dict[str, Array]] = {name: {} for name in self._parts}
        for name, out in wanted.items():
            if self.datasets[name].dtype != out.dtype or not out.flags.c_contiguous:
                out[...] = self.read(name)
            elif name in self._rows:
                for part, lo, hi in self._rows[name]:
                    of_parts[part][name] = out[lo:hi]
            elif name in self._ranges:
                reads += self._start_reading(name, bytes_of(out))
            elif out.shape:  # compressed, in what was checked when the file was opened
                self._file[name].read_direct(out)
            else:
                out[...] = self._file[name][()]
        for part, values in of_parts.items():
            self._parts[part].fill(values)
        for read in reads:
            read.result()

    def verify(self) -> None:
        """Read all values.

        Raises:
            DamagedCheckpoint: Some are not as they were written.
        """
        for read in [read for name in self._ranges for read in self._start_reading(name)]:
            read.result()
        for part in self._parts.values():
            part.verify()

    def _open(self) -> None:
        try:
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
            raise DamagedManifest(f"it ends after {size:,} bytes, inside its first block")
        front = os.pread(self._descriptor, block, 0)
        manifest = Manifest.unpack(front)
        self.identity = digest_of(front)
        if manifest.size != size:
            raise DamagedManifest(f"it has {size:,} bytes, and {manifest.size:,} were written")
        return manifest

    def _copy_rest(self, manifest: Manifest) -> None:
        """Copy what the library is to interpret to memory, where nothing can change it after it was checked."""
        descriptor, digest = self._memory.fileno(), Digest()
        os.ftruncate(descriptor, manifest.size)
        os.pwrite(descriptor, os.pread(self._descriptor, manifest.block, 0), 0)
        for start, stop in manifest.other_ranges():
            at = start
            for piece in pieces(self._descriptor, start, stop):
                digest.add(piece)
                at += os.pwrite(descriptor, piece.data, at)
        if str(digest) != manifest.rest:
            raise self._damaged("its structure (names, shapes, step, options) is not what was written")

    def _list(self) -> None:
        def visit(name: str, item: h5py.Group | h5py.Dataset) -> None:
            if isinstance(item, h5py.Group):
                self.attributes[name] = {key: _python(value) for key, value in item.attrs.items()}
            else:
                self.datasets[name] = DatasetInfo(item.shape, item.dtype)

        visit("/", self._file)
        self._file.visititems(visit)

    def _open_parts(self) -> None:
        """Open the files that the values of virtual datasets are in; see ``parts``."""
        for file, identity in json.loads(self.attributes["/"].get("parts", "{}")).items():
            try:
                part = Checkpoint(self.path.with_name(file))
            except DamagedCheckpoint as error:
                raise self._damaged(f"of its parts {error}") from error
            self._parts[file] = part
            if part.identity != identity:
                raise self._damaged(f"its part {file} is of another checkpoint")
        for name in self.datasets if self._parts else ():
            if self._file[name].is_virtual:
                self._rows[name] = [_rows_in(source) for source in self._file[name].virtual_sources()]

    def _check_name(self) -> None:
        """A file that was renamed would have the run go on at another step than the one it was asked for."""
        named = re.fullmatch(r"step-(\d+)\.h5", self.path.name)
        if named and int(named[1]) != self.step:
            raise self._damaged(f"it holds step {self.step:,}: the file is another's, or was renamed")

    def _start_reading(self, name: str, out: Array | None = None) -> list[Future[None]]:
        """Fill ``out``, shape (n,) uint8, with a dataset's bytes, or only look at them, in threads."""
        first = self._ranges[name][0].start
        return [
            self._pool.submit(self._read_range, name, each, None if out is None else out[each.start - first :])
            for each in self._ranges[name]
        ]

    def _read_range(self, name: str, which: Range, out: Array | None) -> None:
        """Fill the front of ``out``, (n,) uint8, with bytes of a dataset, or only look; called by several threads."""
        start, stop, written = which
        room = np.empty(min(_CHUNK, stop - start), np.uint8) if out is None else None
        digest = Digest()
        for at in range(start, stop, _CHUNK):
            count = min(_CHUNK, stop - at)
            chunk = room[:count] if room is not None else out[at - start : at - start + count]  # type: ignore[index]
            self._read_chunk(at, chunk)
            digest.add(chunk)
        if str(digest) != written:
            raise self._damaged(f"the values of {name} are not what was written")

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
        return DamagedCheckpoint(f"{self.path} is not a whole checkpoint: {why}")


def _rows_in(source: Any) -> tuple[str, int, int]:
    """The file of a part of a virtual dataset, the first of its rows and the one behind the last."""
    first, last = source.vspace.get_select_bounds()
    return source.file_name, int(first[0]), int(last[0]) + 1


def _python(value: Any) -> Any:
    """An attribute as Python has it."""
    if isinstance(value, bytes):
        return value.decode()
    return value.item() if isinstance(value, np.generic) else value
