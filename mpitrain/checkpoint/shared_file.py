"""Shared-file checkpoints: several nodes write one file with parallel HDF5.

The file is the same as one written by a single node; each node writes its share of the rows. Saving has phases; after
each, the nodes agree whether it succeeded on all of them:

1. *frame*: the first node creates everything but the values, under a temporary name and in full length;
2. *access*: every node checks that it may write to the file;
3. *open*: all nodes open it with HDF5's MPI driver;
4. *values*: every node writes its rows independently, and flushes them;
5. *close*: all nodes that opened it close it, also after an error;
6. *flush*: every node flushes data that closing may have written.

Then the first node writes the manifest, and renames the file. Only phases 3 and 5 are collective in HDF5, and no
metadata changes between them. If an error occurs on one node, such as a full disk or a missing permission, no other
node waits inside the library.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..core.h5 import h5py
from ..core.layout import Array, Layout
from .container import Frame, make_frame, memory_file
from .digest import Digest, bytes_of
from .directory import path_for, shard_paths
from .disk import flush_folder, make_folder
from .manifest import Range
from .sharded import ShardSpec, rows_of_shard
from .snapshot import Snapshot
from .state import contents, is_extra_state

_BLOCK_BYTES = 1 << 20  # per write; a block stays in the cache after its digest, and longer writes block other nodes


class WriterGroup(Protocol):
    """The ranks that write the file, one per node. Methods are collective over them; see ``comm.node_leaders``.

    Attributes:
        rank, size: This rank's index, and the number of ranks.
        comm: Their communicator.
    """

    rank: int
    size: int
    comm: Any

    def agree(self, number: int) -> tuple[int, int]:
        """Return the highest number of any rank, and that rank."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""


def unsupported_reason() -> str:
    """Return why this rank's HDF5 cannot write a shared file; empty if it can."""
    if not h5py.get_config().mpi:
        return "h5py was not built with parallel HDF5"
    libraries = mpi_libraries(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))
    if len(libraries) > 1:  # h5py would receive communicators of another library
        return f"h5py and mpi4py use different MPI libraries, {' and '.join(sorted(libraries))}"
    return ""


def mpi_libraries(maps: str) -> set[str]:
    """Return the paths of the MPI libraries in a process; ``maps`` is the text of ``/proc/PID/maps``."""
    files = {line.split(maxsplit=5)[-1] for line in maps.splitlines()}
    return {file for file in files if Path(file).name.startswith(("libmpi.so", "libmpich.so"))}


class SharedFileWriter:
    """Writes checkpoints, each as one file shared by several nodes. Construction is local.

    Args:
        record: See ``state.write``.
        group: The ranks that write.
    """

    def __init__(self, folder: Path, layout: Layout, seed: int, record: Mapping[str, Any], group: WriterGroup) -> None:
        self._folder, self._layout, self._seed, self._record, self._group = folder, layout, seed, record, group
        self._path = self._partial = Path()
        self._arrays: dict[str, Array] = {}
        self._shares: list[dict[str, tuple[int, int]]] = []  # for each node, its rows by array; see ``_share``
        self._ranges: dict[str, list[Range]] = {}
        self._frame: Frame | None = None  # on the first node only
        self._descriptor = -1
        self._file: h5py.File | None = None
        self._error: Exception | None = None
        self._all_ok = True

    def write(self, snapshot: Snapshot) -> None:
        """Write a checkpoint without its manifest; see ``state.write``. Collective over the group.

        If writing fails on some nodes, no checkpoint is written, and these nodes raise an exception.

        Raises:
            OSError: The disk is full, or the directory cannot be written.
        """
        digests: list[str] = []
        self._error, self._all_ok = None, True
        self._phase(lambda: self._make_frame(snapshot))
        self._phase(self._check_access)
        self._phase(self._open)
        opened = self._all_ok
        if self._file is not None and not opened:
            raise RuntimeError(f"HDF5 opened {self._partial} on this node but not on all nodes; it cannot be closed")
        self._phase(lambda: digests.extend(self._write_values()))
        self._phase(self._close, after_failure=opened)
        self._phase(self._flush)
        if self._all_ok:
            self._keep_ranges(self._group.gather(digests))
        else:
            self._remove()
        if self._error is not None:
            raise self._error

    def write_index(self) -> None:
        """Complete the checkpoint of the last ``write``. The first node calls it.

        Raises:
            OSError: The disk is full, or the directory cannot be written.
        """
        frame = self._frame
        assert frame is not None
        try:
            rest = self._write_frame(frame)  # written again, because HDF5 may have changed the structure
            self._write_at(0, frame.manifest(rest, self._ranges).pack())
            os.fsync(self._descriptor)
            os.replace(self._partial, self._path)
            flush_folder(self._folder)
            for path in shard_paths(self._path):
                path.unlink()  # shard of an earlier run, whose index this file has replaced
        finally:
            self._remove()

    def _phase(self, act: Callable[[], None], after_failure: bool = False) -> None:
        """Run a phase unless an earlier phase failed on any node; agree whether it succeeded on all nodes."""
        if not (self._all_ok or after_failure):
            return
        try:
            act()
        except Exception as error:
            self._error = self._error or error
        self._all_ok = self._group.agree(int(self._error is not None))[0] == 0

    def _make_frame(self, snapshot: Snapshot) -> None:
        """Lay out the file; on the first node, create it."""
        arrays, attributes = contents(self._layout, snapshot, self._seed, self._record)
        self._arrays = {name: array for name, array in arrays.items() if array.size}
        self._shares = [self._share(node) for node in range(self._group.size)]
        self._path = path_for(self._folder, snapshot.step)
        self._partial = self._path.with_suffix(".partial")
        if self._group.rank == 0:
            make_folder(self._folder)
            self._descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            names = [name for share in self._shares for name in share]
            self._frame = make_frame(memory_file(), arrays, attributes, names)
            self._write_frame(self._frame)
            os.fsync(self._descriptor)  # network file systems show other hosts only what is on the server

    def _share(self, node: int) -> dict[str, tuple[int, int]]:
        """Return the rows of each array that a node writes: first and last (exclusive). A scalar counts as one row."""
        of_chief = {name: (0, _rows(array)) for name, array in self._arrays.items() if is_extra_state(name)}
        sizes = {
            name: (_rows(array), array.nbytes // _rows(array))
            for name, array in self._arrays.items()
            if name not in of_chief
        }
        shared = rows_of_shard(sizes, ShardSpec(node, self._group.size, ""))
        return {**shared, **of_chief} if node == 0 else shared

    def _check_access(self) -> None:
        """Open the file, to detect missing permissions before the collective open."""
        if self._descriptor < 0:
            self._descriptor = os.open(self._partial, os.O_RDWR | os.O_CLOEXEC)

    def _open(self) -> None:
        with _errors_of_hdf5():
            self._file = h5py.File(self._partial, "r+", driver="mpio", comm=self._group.comm)

    def _write_values(self) -> list[str]:
        """Write this node's rows; return the digests of its rows of each array."""
        digests = [self._write_rows(name, *rows) for name, rows in self._shares[self._group.rank].items()]
        os.fsync(self._descriptor)  # this call releases the GIL; closing the file does not
        return digests

    def _write_rows(self, name: str, lo: int, hi: int) -> str:
        assert self._file is not None
        array, dataset, digest = self._arrays[name], self._file[name], Digest()
        start, row_bytes = dataset.id.get_offset(), array.nbytes // _rows(array)
        values, step = bytes_of(array), max(1, _BLOCK_BYTES // row_bytes)
        for first in range(lo, hi, step):
            last = min(first + step, hi)
            block = values[first * row_bytes : last * row_bytes]
            digest.add(block)
            rows = np.s_[first:last] if array.shape else np.s_[()]
            try:
                with _errors_of_hdf5():
                    dataset.write_direct(array, rows, rows)
            except OSError:
                self._write_at(start + first * row_bytes, block)  # raises the original error, which HDF5 does not show
                raise
        return str(digest)

    def _close(self) -> None:
        file, self._file = self._file, None
        assert file is not None
        with _errors_of_hdf5():
            file.close()

    def _flush(self) -> None:
        os.fsync(self._descriptor)
        if self._group.rank:
            self._forget()

    def _keep_ranges(self, digests: list[list[str]]) -> None:
        """Store the digests of all nodes' rows on the first node."""
        if self._frame is None:
            return
        self._ranges = {name: [] for name in self._frame.places}
        for share, of_share in zip(self._shares, digests, strict=True):
            for (name, (lo, hi)), digest in zip(share.items(), of_share, strict=True):
                array, start = self._arrays[name], self._frame.places[name][0]
                row_bytes = array.nbytes // _rows(array)
                self._ranges[name].append(Range(start + lo * row_bytes, start + hi * row_bytes, digest))

    def _write_frame(self, frame: Frame) -> str:
        """Write everything after the first block except values; return its digest."""
        digest = Digest()
        os.ftruncate(self._descriptor, frame.size)
        for at, chunk in frame.rest():
            digest.add(chunk)
            self._write_at(at, chunk)
        return str(digest)

    def _write_at(self, start: int, data: bytes | Array) -> None:
        """Write bytes, shape (n,) uint8, at offset ``start``."""
        view, done = memoryview(data if isinstance(data, bytes) else data.data), 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], start + done)

    def _remove(self) -> None:
        """Remove the incomplete file, on the first node."""
        if self._group.rank == 0:
            with suppress(OSError):
                self._partial.unlink(missing_ok=True)
        self._forget()

    def _forget(self) -> None:
        """Free the resources of a save."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._frame is not None:
            self._frame.memory.close()
            self._frame = None
        self._arrays = {}


@contextmanager
def _errors_of_hdf5() -> Iterator[None]:
    """Convert errors of the HDF5 library to OSError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}: {error}") from error


def _rows(array: Array) -> int:
    return len(array) if array.shape else 1
