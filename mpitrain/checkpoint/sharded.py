"""A checkpoint in several files: every node writes its part beside the others, and a small index makes them one.

    step-0000010000.h5                     the index: names, shapes, step, options, as in any checkpoint
    step-0000010000-<token>-1-of-2.h5      the first node's part of every array
    step-0000010000-<token>-2-of-2.h5      the second's

Arrays are cut by rows into parts of equal bytes. The index's datasets are HDF5's virtual datasets, so that whoever
opens it sees whole arrays; it also has the digest of each part's first block, which in turn has those of all else in
the part. The index is written when every part is on disk: there is no checkpoint before, and all of it after.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.h5 import h5py
from ..core.layout import Array, Layout, Shape
from ..errors import DamagedCheckpoint
from .container import Compression, write_container
from .directory import part_paths, path_for
from .reader import Checkpoint
from .state import contents


@dataclass(frozen=True)
class Part:
    """Which part of a checkpoint a node writes.

    Attributes:
        index, count: This one, of so many.
        token: Of this run of the program; parts of two runs are never mixed up.
    """

    index: int
    count: int
    token: str


class ShardedWriter:
    """Writes one node's part of checkpoints, and the index of all.

    Args:
        about: See ``state.write``.
    """

    def __init__(
        self, folder: Path, layout: Layout, seed: int, about: Mapping[str, Any], compression: Compression, part: Part
    ) -> None:
        self._folder, self._layout, self._seed, self._about = folder, layout, seed, about
        self._compression, self._part = compression, part
        self._path = Path()
        self._attributes: dict[str, dict[str, Any]] = {}
        self._shapes: dict[str, tuple[Shape, np.dtype[Any]]] = {}
        self._small: dict[str, Array] = {}

    def write(
        self, vectors: Mapping[str, Array], step: int, data_cursor: int, extra_state: Mapping[str, float] | None = None
    ) -> None:
        """Write this node's part of a checkpoint; see ``state.write``. Local.

        Raises:
            OSError: The disk is full, or the folder cannot be written to.
        """
        arrays, attributes = contents(self._layout, vectors, step, data_cursor, extra_state, self._seed, self._about)
        self._path, self._attributes = path_for(self._folder, step), attributes
        # What has no rows is small, and lies in the index itself.
        self._small = {name: array.copy() for name, array in arrays.items() if not array.shape or not array.size}
        cut = {name: array for name, array in arrays.items() if name not in self._small}
        self._shapes = {name: (array.shape, array.dtype) for name, array in cut.items()}
        rows = rows_of_part({name: (len(a), a.nbytes // len(a)) for name, a in cut.items()}, self._part)
        mine = {name: array[slice(*rows[name])] for name, array in cut.items() if name in rows}
        write_container(self._name(self._part.index), mine, {"/": attributes["/"]}, self._compression)

    def write_index(self) -> None:
        """Make the parts of the last ``write`` a checkpoint, when all of them are on disk. One rank does.

        Raises:
            OSError: The disk is full, or the folder cannot be written to, or a part is not there.
        """
        count = self._part.count
        digests = {}
        for index in range(count):
            try:
                with Checkpoint(self._name(index)) as part:
                    digests[part.path.name] = part.identity
            except DamagedCheckpoint as error:
                raise OSError(errno.EIO, str(error)) from error
        self._attributes["/"]["parts"] = json.dumps(digests)
        bytes_of_rows = {name: (shape[0], _row_bytes(shape, dtype)) for name, (shape, dtype) in self._shapes.items()}
        virtual = {name: h5py.VirtualLayout(shape, dtype) for name, (shape, dtype) in self._shapes.items()}
        for index in range(count):
            for name, (lo, hi) in rows_of_part(bytes_of_rows, replace(self._part, index=index)).items():
                shape, dtype = self._shapes[name]
                part_shape = (hi - lo, *shape[1:])
                virtual[name][lo:hi] = h5py.VirtualSource(self._name(index).name, name, part_shape, dtype)
        write_container(self._path, self._small, self._attributes, virtual=virtual)
        for path in part_paths(self._path):
            if path.name not in digests:
                path.unlink()  # another run's, whose index this one has replaced

    def _name(self, index: int) -> Path:
        part = self._part
        return self._path.with_name(f"{self._path.stem}-{part.token}-{index + 1}-of-{part.count}.h5")


def rows_of_part(arrays: Mapping[str, tuple[int, int]], part: Part) -> dict[str, tuple[int, int]]:
    """Which rows of arrays a part holds: those that begin in its share of all bytes, in the order of the arrays.

    Args:
        arrays: Rows and bytes of a row, by name; neither may be 0.

    Returns:
        First row and the one behind the last, for arrays of which the part has any.
    """
    total = sum(rows * row_bytes for rows, row_bytes in arrays.values())
    found, start = {}, 0
    for name, (rows, row_bytes) in arrays.items():
        lo, hi = (
            min(rows, max(0, -((start * part.count - index * total) // (row_bytes * part.count))))
            for index in (part.index, part.index + 1)
        )
        if lo < hi:
            found[name] = lo, hi
        start += rows * row_bytes
    return found


def _row_bytes(shape: Shape, dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
