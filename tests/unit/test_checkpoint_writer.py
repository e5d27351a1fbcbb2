"""Saving beside the training: a save is of the moment it was asked for, and one that fails stops nobody."""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint.writer import CheckpointWriter, Write
from mpitrain.core.layout import Array, Layout

Numbers = Mapping[str, float] | None

LAYOUT = Layout.pack([("a", (1000,), "param")])


def make(
    folder: Path, background: bool, told: list[str] | None = None, keep: int = 0, write: Write | None = None
) -> CheckpointWriter:
    say = ([] if told is None else told).append
    return CheckpointWriter(folder, write or partial(write_to, folder), checkpoint.Retention(keep), background, say)


def write_to(folder: Path, vectors: Mapping[str, Array], step: int, position: int, numbers: Numbers) -> None:
    checkpoint.write(checkpoint.path_for(folder, step), LAYOUT, vectors, step, position, 0, {}, extra_state=numbers)


def held(folder: Path, step: int, numbers: Mapping[str, float]) -> float:
    params = np.zeros(LAYOUT.size)
    reached = checkpoint.read(checkpoint.path_for(folder, step), LAYOUT, {"params": params}, 0)
    assert reached == (step, 2 * step, numbers)
    assert (params[:1000] == params[0]).all()
    return float(params[0])


@pytest.mark.parametrize("background", [False, True])
def test_a_save_is_of_its_moment(tmp_path: Path, background: bool) -> None:
    writer, params = make(tmp_path, background), np.zeros(LAYOUT.size)
    for step in range(1, 30):
        params[:] = step
        writer.save({"params": params}, step, 2 * step, {"loss_scale": step + 0.5})
        writer.wait_for_copy()
        params[:] = -1  # training goes on
    writer.close()
    assert [held(tmp_path, step, {"loss_scale": step + 0.5}) for step in range(1, 30)] == [*range(1, 30)]
    assert writer.longest_s > 0


def test_two_saves_never_overlap(tmp_path: Path) -> None:
    writing, most = [0], [0]

    def watched(vectors: Mapping[str, Array], step: int, position: int, numbers: Numbers) -> None:
        writing[0] += 1
        most[0] = max(most[0], writing[0])
        write_to(tmp_path, vectors, step, position, numbers)
        writing[0] -= 1

    writer = make(tmp_path, True, write=watched)
    for step in range(1, 20):
        writer.save({"params": np.zeros(LAYOUT.size)}, step, 2 * step)
    writer.close()
    assert most == [1]
    assert len(checkpoint.steps(tmp_path)) == 19


def test_saving_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    may_write = threading.Event()

    def slow(vectors: Mapping[str, Array], step: int, position: int, numbers: Numbers) -> None:
        assert may_write.wait(timeout=30)
        write_to(tmp_path, vectors, step, position, numbers)

    writer = make(tmp_path, True, write=slow)
    writer.save({"params": np.ones(LAYOUT.size)}, 1, 2)
    writer.wait_for_copy()  # returns, though nothing can be written yet
    assert not checkpoint.steps(tmp_path)
    may_write.set()
    writer.close()
    assert held(tmp_path, 1, {}) == 1


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_is_told_and_the_next_may_succeed(tmp_path: Path, background: bool) -> None:
    def full_at_two(vectors: Mapping[str, Array], step: int, position: int, numbers: Numbers) -> None:
        if step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_to(tmp_path, vectors, step, position, numbers)

    told: list[str] = []
    writer, state = make(tmp_path, background, told, write=full_at_two), {"params": np.ones(LAYOUT.size)}
    writer.save(state, 1, 2)
    writer.finish()
    writer.save(state, 2, 4)
    writer.finish()
    assert len(told) == 1
    assert " step 2 " in told[0] and "No space left on device" in told[0]
    assert writer.failure is not None
    assert [*checkpoint.steps(tmp_path)] == [1]
    writer.save(state, 3, 6)
    writer.close()
    assert writer.failure is None
    assert [*checkpoint.steps(tmp_path)] == [3, 1]


def test_old_ones_go(tmp_path: Path) -> None:
    writer = make(tmp_path, True, keep=2)
    for step in range(1, 6):
        writer.save({"params": np.zeros(LAYOUT.size)}, step, 2 * step)
    writer.close()
    assert [*checkpoint.steps(tmp_path)] == [5, 4]
