"""Sharded checkpoints: every node writes a shard, and a small index file joins them.

    step-0000010000.h5                     the index: names, shapes, step, options, as in any checkpoint
    step-0000010000-<token>-1-of-2.h5      the first node's shard
    step-0000010000-<token>-2-of-2.h5      the second node's shard

Arrays are split by rows into shards of nearly equal size. The index contains virtual datasets of HDF5, so that readers
see complete arrays. The index also contains the digest of each shard's manifest. The manifest covers everything else in
the shard. The index is written when all shards are on disk; the checkpoint exists from that moment on.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.checkpoint_files import path_for, shard_paths
from ..core.layout import Array, Layout, Shape
from ..errors import DamagedCheckpoint
from .container import Compression, write_container
from .reader import Checkpoint
from .snapshot import Snapshot
from .state import contents, is_extra_state
from .structure import Dataset, Rows


@dataclass(frozen=True)
class ShardSpec:
    """Identifies the shard that a node writes.

    Attributes:
        index, count: The index of the shard, and the number of shards.
        token: Random text of this attempt, so that shards of two attempts are never mixed.
    """

    index: int
    count: int
    token: str


class ShardedWriter:
    """Writes one node's shards, and the index.

    Args:
        record: See ``state.write``.
        shard: The shard to write.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        seed: int,
        record: Mapping[str, Any],
        compression: Compression,
        shard: ShardSpec,
    ) -> None:
        self._folder, self._layout, self._seed, self._record = folder, layout, seed, record
        self._compression, self._shard = compression, shard
        self._path = Path()
        self._attributes: dict[str, dict[str, Any]] = {}
        self._shapes: dict[str, tuple[Shape, np.dtype[Any]]] = {}
        self._small: dict[str, Array] = {}

    def write(self, snapshot: Snapshot) -> None:
        """Write this node's shard of a checkpoint; see ``state.write``. Local.

        Raises:
            OSError: The disk is full, or the directory cannot be written.
        """
        arrays, attributes = contents(self._layout, snapshot, self._seed, self._record)
        self._path, self._attributes = path_for(self._folder, snapshot.step), attributes
        # Arrays without rows, and arrays that only the chief has, are stored in the index.
        self._small = {
            name: array.copy()
            for name, array in arrays.items()
            if not array.shape or not array.size or is_extra_state(name)
        }
        cut = {name: array for name, array in arrays.items() if name not in self._small}
        self._shapes = {name: (array.shape, array.dtype) for name, array in cut.items()}
        rows = rows_of_shard({name: (len(a), a.nbytes // len(a)) for name, a in cut.items()}, self._shard)
        local = {name: array[slice(*rows[name])] for name, array in cut.items() if name in rows}
        write_container(self._name(self._shard.index), local, {"/": attributes["/"]}, self._compression)

    def write_index(self) -> None:
        """Write the index for the last ``write``, after all shards are on disk. One rank calls it.

        Raises:
            OSError: The disk is full, the directory cannot be written, or a shard is missing.
        """
        count = self._shard.count
        digests = {}
        for index in range(count):
            try:
                with Checkpoint(self._name(index)) as shard:
                    digests[shard.path.name] = shard.identity
            except DamagedCheckpoint as error:
                raise OSError(errno.EIO, str(error)) from error
        self._attributes["/"]["parts"] = json.dumps(digests)
        bytes_of_rows = {name: (shape[0], _row_bytes(shape, dtype)) for name, (shape, dtype) in self._shapes.items()}
        rows: dict[str, list[Rows]] = {name: [] for name in self._shapes}
        for index in range(count):
            for name, (lo, hi) in rows_of_shard(bytes_of_rows, replace(self._shard, index=index)).items():
                rows[name].append(Rows(self._name(index).name, lo, hi))
        virtual = {name: Dataset(*self._shapes[name], virtual=tuple(parts)) for name, parts in rows.items()}
        write_container(self._path, self._small, self._attributes, virtual=virtual)
        for path in shard_paths(self._path):
            if path.name not in digests:
                path.unlink()  # shard of an earlier attempt, whose index was just replaced

    def _name(self, index: int) -> Path:
        shard = self._shard
        return self._path.with_name(f"{self._path.stem}-{shard.token}-{index + 1}-of-{shard.count}.h5")


def rows_of_shard(arrays: Mapping[str, tuple[int, int]], shard: ShardSpec) -> dict[str, tuple[int, int]]:
    """Return a shard's rows of each array.

    The bytes of all arrays, in this order, are divided equally; a shard has the rows that begin in its part.

    Args:
        arrays: Number of rows and bytes per row, by name; neither may be 0.
        shard: The shard.

    Returns:
        First and last (exclusive) row, for each array that has rows in the shard.
    """
    total = sum(rows * row_bytes for rows, row_bytes in arrays.values())
    held, start = {}, 0
    for name, (rows, row_bytes) in arrays.items():
        lo, hi = (
            min(rows, max(0, -((start * shard.count - index * total) // (row_bytes * shard.count))))
            for index in (shard.index, shard.index + 1)
        )
        if lo < hi:
            held[name] = lo, hi
        start += rows * row_bytes
    return held


def _row_bytes(shape: Shape, dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
