"""Checkpoints that several nodes write as one file.

The file is the same as one written by a single node; each node writes a part of its bytes. Saving has phases; after
each, the nodes agree whether it succeeded on all of them:

1. *create*: the first node makes the structure of the file, and creates the file under a temporary name;
2. *open*: the other nodes open it;
3. *write*: every node writes its part, and waits until it is on disk.

Then the first node writes the manifest, with the digests of all parts, and renames the file. Each part begins at a
multiple of the file system's block, so that no two hosts write to one block.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..core.checkpoint_files import path_for, shard_paths
from ..core.layout import Array, Layout
from .container import Frame, Places, make_frame, memory_file
from .disk import DiskWriter, joining, replacing
from .manifest import Range
from .snapshot import Snapshot
from .state import contents, is_extra_state

T = TypeVar("T")


class WriterGroup(Protocol):
    """The ranks that write the file, one per node. Methods are collective over them; see ``comm.node_leaders``.

    Attributes:
        rank, size: This rank's index, and the number of ranks.
    """

    rank: int
    size: int

    def agree(self, number: int) -> tuple[int, int]:
        """Return the highest number of any rank, and that rank."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""


class SharedFileWriter:
    """Writes checkpoints, each as one file shared by several nodes. Construction is local.

    Args:
        record: See ``state.write``.
        group: The ranks that write.
    """

    _frame: Frame
    _writer: DiskWriter

    def __init__(self, folder: Path, layout: Layout, seed: int, record: Mapping[str, Any], group: WriterGroup) -> None:
        self._folder, self._layout, self._seed, self._record, self._group = folder, layout, seed, record, group
        self._path = Path()
        self._arrays: dict[str, Array] = {}
        self._ranges: list[dict[str, Range]] = []  # of each part, by array
        self._resources = ExitStack()  # on the first node, until the manifest is written: the open file

    def write(self, snapshot: Snapshot) -> None:
        """Write a checkpoint without its manifest; see ``state.write``. Collective over the group.

        If writing fails on some nodes, no checkpoint is written, and these nodes raise an exception.

        Raises:
            OSError: The disk is full, or the directory cannot be written.
        """
        rank, size = self._group.rank, self._group.size
        with suppress(_OtherNodeFailed), ExitStack() as resources:
            described, *_ = self._phase(lambda: self._create(snapshot, resources))
            blocks = self._phase(lambda: self._open(described, resources))
            bounds = part_bounds(self._frame.places, self._frame.size, math.lcm(*blocks), size)
            self._ranges = self._phase(lambda: self._write_part(bounds[rank], bounds[rank + 1]))
            if rank == 0:
                self._resources = resources.pop_all()
        self._arrays = {}

    def write_index(self) -> None:
        """Complete the checkpoint of the last ``write``. The first node calls it.

        Raises:
            OSError: The disk is full, or the directory cannot be written.
        """
        with self._resources:
            self._frame.write_manifest(self._writer, self._ranges)
        for path in shard_paths(self._path):
            path.unlink()  # shard of an earlier run, whose index this file has replaced

    def _phase(self, act: Callable[[], T]) -> list[T]:
        """Call ``act`` on every node; return the results of all nodes.

        Raises:
            Exception: ``act`` has raised it on this node.
            _OtherNodeFailed: It has raised an exception on another node only.
        """
        result: Any = None
        error: Exception | None = None
        try:
            result = act()
        except Exception as caught:
            error = caught
        failed, _ = self._group.agree(int(error is not None))
        if error is not None:
            raise error
        if failed:
            raise _OtherNodeFailed
        return self._group.gather(result)

    def _create(self, snapshot: Snapshot, resources: ExitStack) -> tuple[Any, ...]:
        """On the first node, create the file; return its frame: block, size, places, and chunks of the structure."""
        self._path = path_for(self._folder, snapshot.step)
        arrays, attributes = contents(self._layout, snapshot, self._seed, self._record)
        # Extra state comes first, because only the first node has it.
        self._arrays = dict(sorted(arrays.items(), key=lambda item: not is_extra_state(item[0])))
        if self._group.rank:
            return ()
        memory = resources.enter_context(memory_file())
        ranges = [*arrays, *[""] * (self._group.size - 1)]  # each bound of parts may split one range
        self._frame = frame = make_frame(memory, self._arrays, attributes, ranges)
        self._writer = resources.enter_context(replacing(self._path))
        return frame.block, frame.size, frame.places, [(at, chunk) for at, chunk in frame.rest() if chunk.any()]

    def _open(self, described: tuple[Any, ...], resources: ExitStack) -> int:
        """Open the file that the first node has created; return the unit of parts."""
        if self._group.rank:
            block, size, places, rest = described
            memory = resources.enter_context(memory_file())
            for at, chunk in rest:  # the library stores some of the structure after values
                os.pwrite(memory.fileno(), chunk, at)
            self._frame = Frame(memory, block, size, places, {})  # the first node writes the manifest
            self._writer = resources.enter_context(joining(self._path))
        return self._writer.block_bytes

    def _write_part(self, start: int, stop: int) -> dict[str, Range]:
        """Write bytes [start, stop) of the file to disk; return the ranges of the values in them, by array."""
        if start == stop:
            return {}
        self._writer.start_at(start)
        ranges = self._frame.write_part(self._writer, self._arrays, start, stop)
        self._writer.finish()
        return ranges


class _OtherNodeFailed(Exception):
    """A phase has failed on another node, which reports it."""


def part_bounds(places: Places, size: int, block: int, count: int) -> list[int]:
    """Divide a file into parts, which begin at multiples of a block; what is no extra state is divided equally.

    Args:
        places: The places of the values, by the dataset's name.
        size: Size of the file in bytes.
        block: Size of a block in bytes.
        count: Number of parts.

    Returns:
        The first byte of each part, and ``size``. The first part has all extra state.
    """
    front = max((stop for name, (_, stop) in places.items() if is_extra_state(name)), default=0)
    bounds = [front + (size - front) * part // count for part in range(1, count)]
    return [0, *(min(size, -(-bound // block) * block) for bound in bounds), size]
