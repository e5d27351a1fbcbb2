"""A file that several nodes write; here, threads stand for nodes. With ranks: ``tests/mpi/test_checkpoints.py``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint.container import make_frame, memory_file
from mpitrain.checkpoint.shared_file import SharedFileWriter, part_bounds
from mpitrain.checkpoint.state import root_attributes
from mpitrain.core.extra_state import Versioned
from mpitrain.core.layout import Layout

NODES = 3
# HDF5 stores the names of so many arrays after their values.
LAYOUT = Layout.pack([(f"a{i}", (50, 30), "param") for i in range(40)])
STATE = {name: np.arange(LAYOUT.size, dtype=np.float32) + k for k, name in enumerate(("params", "momentum"))}


class Node:
    """A node that is a thread; see ``WriterGroup``. It publishes digests only after it has called ``os.fsync``."""

    size = NODES

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier, synced: set[int]) -> None:
        self.rank, self._values, self._barrier, self._synced = rank, values, barrier, synced

    def agree(self, number: int) -> tuple[int, int]:
        return max((value, -rank) for rank, value in enumerate(self.gather(number)))

    def gather(self, value: Any) -> list[Any]:
        assert not isinstance(value, dict) or threading.get_ident() in self._synced
        self._values[self.rank] = value
        self._barrier.wait()
        values = [*self._values]
        self._barrier.wait()
        return values


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[BaseException | None]]:
    """Saves the snapshots of all nodes as one file; returns their errors."""
    values, barrier, synced, fsync = [None] * NODES, threading.Barrier(NODES, timeout=60), set[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.add(threading.get_ident()), fsync(descriptor)))
    nodes = [Node(rank, values, barrier, synced) for rank in range(NODES)]
    writers = [SharedFileWriter(tmp_path, LAYOUT, 7, {}, node) for node in nodes]

    def save(snapshots: list[checkpoint.Snapshot]) -> list[BaseException | None]:
        with ThreadPoolExecutor(NODES) as pool:
            done = [pool.submit(writer.write, snapshot) for writer, snapshot in zip(writers, snapshots, strict=True)]
            errors = [future.exception() for future in done]
        if not any(errors):
            writers[0].write_index()
        return errors

    return save


def test_the_file_has_the_parts_of_all_nodes(save, tmp_path: Path) -> None:
    """Only the first node has extra state."""
    extra = {"buffers": Versioned(1, {"odd": np.arange(7, dtype=np.int8), "large": np.arange(5000.0)})}
    save([checkpoint.Snapshot(STATE, 4, 8, extra if node == 0 else {}) for node in range(NODES)])
    path = checkpoint.path_for(tmp_path, 4)
    assert [*tmp_path.iterdir()] == [path] and not checkpoint.verify(path)
    with checkpoint.Checkpoint(path) as opened:
        assert len(opened.read("buffers/large")) == 5000
        assert sum(len(ranges) for ranges in opened._ranges.values()) == len(opened.datasets) + NODES - 1
    found = {name: np.zeros_like(vector) for name, vector in STATE.items()}
    checkpoint.read(path, LAYOUT, found, 7)
    for name, vector in STATE.items():
        for entry, view in LAYOUT.views(vector).items():
            assert np.array_equal(LAYOUT.views(found[name])[entry], view)


def test_a_node_that_fails_leaves_no_file(save, tmp_path: Path) -> None:
    lost = checkpoint.Snapshot({name: vector[:9] for name, vector in STATE.items()}, 4, 8)
    errors = save([checkpoint.Snapshot(STATE, 4, 8), lost, checkpoint.Snapshot(STATE, 4, 8)])
    assert [error is not None for error in errors] == [False, True, False]
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("count", [1, 2, 5, 200])
def test_parts_begin_at_blocks(count: int) -> None:
    places = {"buffers/b": (5000, 20_007), "params/a": (20_008, 300_000), "params/c": (4096, 4100)}
    bounds = part_bounds(places, 300_001, 4096, count)
    assert len(bounds) == count + 1 and bounds[0] == 0 and bounds[-1] == 300_001 and bounds == sorted(bounds)
    assert all(bound % 4096 == 0 or bound == 300_001 for bound in bounds)
    assert count == 1 or bounds[1] >= 20_007  # extra state is in the first part
    assert max(np.diff(bounds)[1:], default=0) <= 280_000 / count + 4096


def test_values_are_aligned() -> None:
    """So that any multiple of 8 is between two values."""
    arrays = {f"g/{i}": np.zeros(1 + i % 40 * 77, ("int8", "float16", "float64")[i % 3]) for i in range(400)}
    with memory_file() as memory:
        places = make_frame(memory, arrays, {"/": root_attributes(1, 2, 3)}, arrays).places
    assert not any(start % 8 for start, _ in places.values())
