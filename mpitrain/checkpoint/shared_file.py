"""A checkpoint in one file that several nodes write together, by parallel HDF5.

The file is the one that a single node would write; each node writes its share of the rows. It comes about in phases,
after each of which the nodes agree whether all have come through it:

1. *frame*: the first node makes everything but the values, under a temporary name, as long as the file will be;
2. *look*: every node makes sure that it may write there;
3. *open*: all open it by HDF5's driver for MPI;
4. *values*: every node writes its rows, each by itself, and has them on disk;
5. *close*: all close it, whatever has happened since they opened it;
6. *flush*: every node has on disk what closing may have left.

Then the first node writes the block in front, and the file gets its name. Only 3 and 5 are collective in HDF5, and
between them no metadata change. So what fails on one node, for a full disk or a lack of rights, fails where nobody
waits for that node inside the library.
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
from .directory import part_paths, path_for
from .disk import flush_folder, make_folder
from .manifest import Manifest, Range
from .sharded import Part, rows_of_part
from .state import contents

_BLOCK_BYTES = 1 << 20  # written at a time: in the cache from its digest; longer ones have others wait for the file


class WriterGroup(Protocol):
    """The ranks that write together, one a node. Methods are collective over them; see ``comm.leaders``.

    Attributes:
        rank, size: Of this one.
        comm: Theirs.
    """

    rank: int
    size: int
    comm: Any

    def agree(self, number: int) -> tuple[int, int]:
        """The highest number that any of them tells, and who told it."""

    def gather(self, mine: Any) -> list[Any]:
        """What each of them gives."""


def lacks() -> str:
    """Why this rank's HDF5 cannot write a file together with others'; empty where it can."""
    if not h5py.get_config().mpi:
        return "h5py was not built with parallel HDF5"
    libraries = mpi_libraries(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))
    if len(libraries) > 1:  # one would be given communicators of the other
        return f"h5py and mpi4py use different MPI libraries, {' and '.join(sorted(libraries))}"
    return ""


def mpi_libraries(maps: str) -> set[str]:
    """The MPI libraries in a process, by their paths; ``maps`` is what the kernel tells of its memory."""
    files = {line.split(maxsplit=5)[-1] for line in maps.splitlines()}
    return {file for file in files if Path(file).name.startswith(("libmpi.so", "libmpich.so"))}


class SharedFileWriter:
    """Writes checkpoints together with other nodes. Construction is local.

    Args:
        about: See ``state.write``.
    """

    def __init__(self, folder: Path, layout: Layout, seed: int, about: Mapping[str, Any], group: WriterGroup) -> None:
        self._folder, self._layout, self._seed, self._about, self._group = folder, layout, seed, about, group
        self._path = self._partial = Path()
        self._arrays: dict[str, Array] = {}
        self._shares: list[dict[str, tuple[int, int]]] = []  # of each node: rows by array, see ``_share``
        self._ranges: dict[str, list[Range]] = {}
        self._frame: Frame | None = None  # of the first node
        self._descriptor = -1
        self._file: h5py.File | None = None
        self._error: Exception | None = None
        self._all_well = True

    def write(
        self, vectors: Mapping[str, Array], step: int, data_cursor: int, extra_state: Mapping[str, float] | None = None
    ) -> None:
        """Write all of a checkpoint but its seal; see ``state.write``. Collective over the team.

        Where some nodes cannot, there will be no checkpoint, and these raise.

        Raises:
            OSError: The disk is full, or the folder cannot be written to.
        """
        digests: list[str] = []
        self._error, self._all_well = None, True
        self._phase(lambda: self._make_frame(vectors, step, data_cursor, extra_state))
        self._phase(self._look)
        self._phase(self._open)
        opened = self._all_well
        if self._file is not None and not opened:
            raise RuntimeError(f"HDF5 opened {self._partial} on this node and not on all, so that nobody can close it")
        self._phase(lambda: digests.extend(self._write_values()))
        self._phase(self._close, whatever_happened=opened)
        self._phase(self._flush)
        if self._all_well:
            self._keep_ranges(self._group.gather(digests))
        else:
            self._remove()
        if self._error is not None:
            raise self._error

    def write_index(self) -> None:
        """Make what the last ``write`` has written a checkpoint. The first node does.

        Raises:
            OSError: The disk is full, or the folder cannot be written to.
        """
        frame = self._frame
        assert frame is not None
        try:
            rest = self._write_frame(frame)  # once more: it is to be what was made, whatever HDF5 may have done to it
            self._write_at(0, Manifest(frame.block, frame.size, rest, self._ranges).pack())
            os.fsync(self._descriptor)
            os.replace(self._partial, self._path)
            flush_folder(self._folder)
            for path in part_paths(self._path):
                path.unlink()  # an earlier run's, whose index this file has replaced
        finally:
            self._remove()

    def _phase(self, act: Callable[[], None], whatever_happened: bool = False) -> None:
        """Do what may fail on this node, if all went well so far, and learn whether it did on all."""
        if not (self._all_well or whatever_happened):
            return
        try:
            act()
        except Exception as error:
            self._error = self._error or error
        self._all_well = self._group.agree(int(self._error is not None))[0] == 0

    def _make_frame(
        self, vectors: Mapping[str, Array], step: int, data_cursor: int, extra_state: Mapping[str, float] | None
    ) -> None:
        """Lay the file out; on the first node make it."""
        arrays, attributes = contents(self._layout, vectors, step, data_cursor, extra_state, self._seed, self._about)
        self._arrays = {name: array for name, array in arrays.items() if array.size}
        self._shares = [self._share(node) for node in range(self._group.size)]
        self._path = path_for(self._folder, step)
        self._partial = self._path.with_suffix(".partial")
        if self._group.rank == 0:
            make_folder(self._folder)
            self._descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            names = [name for share in self._shares for name in share]
            self._frame = make_frame(memory_file(), arrays, attributes, names)
            self._write_frame(self._frame)
            os.fsync(self._descriptor)  # a network file system shows others what is on its server

    def _share(self, node: int) -> dict[str, tuple[int, int]]:
        """Which rows of arrays a node writes: the first, and the one behind the last. A scalar counts as a row."""
        sizes = {name: (_rows(array), array.nbytes // _rows(array)) for name, array in self._arrays.items()}
        return rows_of_part(sizes, Part(node, self._group.size, ""))

    def _look(self) -> None:
        """Find out what this node may not do while nobody waits for it inside the library."""
        if self._descriptor < 0:
            self._descriptor = os.open(self._partial, os.O_RDWR | os.O_CLOEXEC)

    def _open(self) -> None:
        with _errors_of_hdf5():
            self._file = h5py.File(self._partial, "r+", driver="mpio", comm=self._group.comm)

    def _write_values(self) -> list[str]:
        """Write this node's rows; return the digest of those of each array."""
        digests = [self._write_rows(name, *rows) for name, rows in self._shares[self._group.rank].items()]
        os.fsync(self._descriptor)  # which lets other threads run; closing does not
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
                self._write_at(start + first * row_bytes, block)  # HDF5 does not tell why it cannot; the system does
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
        """Note the digests of all nodes' rows, where the first node will find them."""
        if self._frame is None:
            return
        self._ranges = {name: [] for name in self._frame.places}
        for share, of_share in zip(self._shares, digests, strict=True):
            for (name, (lo, hi)), digest in zip(share.items(), of_share, strict=True):
                array, start = self._arrays[name], self._frame.places[name][0]
                row_bytes = array.nbytes // _rows(array)
                self._ranges[name].append(Range(start + lo * row_bytes, start + hi * row_bytes, digest))

    def _write_frame(self, frame: Frame) -> str:
        """Write all that is behind the first block and no value; return its digest."""
        digest = Digest()
        os.ftruncate(self._descriptor, frame.size)
        for at, piece in frame.rest():
            digest.add(piece)
            self._write_at(at, piece)
        return str(digest)

    def _write_at(self, start: int, data: bytes | Array) -> None:
        """Write bytes, shape (n,) uint8, from ``start`` on."""
        view, done = memoryview(data if isinstance(data, bytes) else data.data), 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], start + done)

    def _remove(self) -> None:
        """Remove what is no checkpoint; on the first node."""
        if self._group.rank == 0:
            with suppress(OSError):
                self._partial.unlink(missing_ok=True)
        self._forget()

    def _forget(self) -> None:
        """Give back what a save takes."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._frame is not None:
            self._frame.memory.close()
            self._frame = None
        self._arrays = {}


@contextmanager
def _errors_of_hdf5() -> Iterator[None]:
    """What the library raises, as an error of the system."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}: {error}") from error


def _rows(array: Array) -> int:
    return len(array) if array.shape else 1
