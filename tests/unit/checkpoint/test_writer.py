"""Background saving: a checkpoint has the state of the step that requested it, and a failure stops nothing."""

from __future__ import annotations

import errno
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint import Snapshot
from mpitrain.checkpoint.writer import CheckpointWriter, Write
from mpitrain.core.extra_state import ExtraState, Versioned
from mpitrain.core.layout import Layout
from mpitrain.training.checkpointing import WrittenCheckpoints

from ...support.waiting import wait_until

LAYOUT = Layout.pack([("a", (1000,), "param")])


def make(folder: Path, background: bool, keep: int = 0, write: Write | None = None) -> CheckpointWriter:
    return CheckpointWriter(folder, write or partial(write_to, folder), checkpoint.Retention(keep), background)


def write_to(folder: Path, snapshot: Snapshot) -> None:
    checkpoint.write(checkpoint.path_for(folder, snapshot.step), LAYOUT, snapshot, 0, {})


def snapshot_of(step: int, value: float = 0.0) -> Snapshot:
    return Snapshot({"params": np.full(LAYOUT.size, value)}, step, 2 * step)


def scale_of(step: int) -> ExtraState:
    return {"loss_scale": Versioned(1, {"scale": step + 0.5})}


def read_value(folder: Path, step: int, extra_state: ExtraState) -> float:
    params = np.zeros(LAYOUT.size)
    restored = checkpoint.read(checkpoint.path_for(folder, step), LAYOUT, {"params": params}, 0)
    assert restored == ((step, 2 * step), extra_state)
    assert (params[:1000] == params[0]).all()
    return float(params[0])


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_has_the_state_of_its_step(tmp_path: Path, background: bool) -> None:
    writer, params = make(tmp_path, background), np.zeros(LAYOUT.size)
    for step in range(1, 30):
        params[:] = step
        snapshot = Snapshot({"params": params}, step, 2 * step, scale_of(step))
        writer.save(snapshot)
        snapshot.wait()
        params[:] = -1  # training continues
    writer.close()
    found = [read_value(tmp_path, step, scale_of(step)) for step in range(1, 30)]
    assert found == [*range(1, 30)]
    assert writer.longest_s > 0


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("private", [False, True])
def test_a_snapshot_is_released(tmp_path: Path, background: bool, private: bool) -> None:
    """It is released even if its checkpoint cannot be written. Background saving copies it unless it is private."""
    seen = []

    def fail(snapshot: Snapshot) -> None:
        seen.append(snapshot.vectors["params"])
        raise OSError(errno.EIO, "Input/output error")

    writer, params = make(tmp_path, background, write=fail), np.zeros(LAYOUT.size)
    snapshot = Snapshot({"params": params}, 1, 2, private=private)
    writer.save(snapshot)
    snapshot.wait()
    writer.close()
    assert writer.failure is not None
    assert (seen[0] is params) == (private or not background)


def test_two_saves_never_overlap(tmp_path: Path) -> None:
    writing, most = [0], [0]

    def watched(snapshot: Snapshot) -> None:
        writing[0] += 1
        most[0] = max(most[0], writing[0])
        write_to(tmp_path, snapshot)
        writing[0] -= 1

    writer = make(tmp_path, True, write=watched)
    for step in range(1, 20):
        writer.save(snapshot_of(step))
    writer.close()
    assert most == [1]
    assert len(checkpoint.steps(tmp_path)) == 19


def test_saving_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    may_write = threading.Event()

    def slow(snapshot: Snapshot) -> None:
        assert may_write.wait(timeout=30)
        write_to(tmp_path, snapshot)

    writer, snapshot = make(tmp_path, True, write=slow), snapshot_of(1, value=1.0)
    writer.save(snapshot)
    snapshot.wait()  # returns although nothing can be written yet
    assert not checkpoint.steps(tmp_path)
    may_write.set()
    writer.close()
    assert read_value(tmp_path, 1, {}) == 1


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_is_logged_and_the_next_may_succeed(
    tmp_path: Path, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def full_at_two(snapshot: Snapshot) -> None:
        if snapshot.step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_to(tmp_path, snapshot)

    writer = make(tmp_path, background, write=full_at_two)
    writer.save(snapshot_of(1))
    writer.finish()
    writer.save(snapshot_of(2))
    writer.finish()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert " step 2 " in caplog.text and "No space left on device" in caplog.text
    assert writer.failure is not None
    assert [*checkpoint.steps(tmp_path)] == [1]
    writer.save(snapshot_of(3))
    writer.close()
    assert writer.failure is None
    assert [*checkpoint.steps(tmp_path)] == [3, 1]


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    writer = make(tmp_path, True, keep=2)
    for step in range(1, 6):
        writer.save(snapshot_of(step))
    writer.close()
    assert [*checkpoint.steps(tmp_path)] == [5, 4]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_best_checkpoint_is_recorded_when_it_is_complete(tmp_path: Path, is_sharded: bool) -> None:
    retention = checkpoint.Retention(1)
    write = (lambda snapshot: None) if is_sharded else partial(write_to, tmp_path)
    writer = CheckpointWriter(tmp_path, write, retention, background=True, is_sharded=is_sharded)
    for step, value in ((1, 0.5), (2, None), (3, 0.75), (4, None)):
        snapshot = snapshot_of(step)
        snapshot.best = None if value is None else checkpoint.BestCheckpoint(step, "auc", value, only_best=True)
        writer.save(snapshot)
        if is_sharded:
            writer.finish()
            assert getattr(checkpoint.best(tmp_path), "step", 0) < step
            writer.complete(step, partial(write_to, tmp_path, snapshot_of(step)))
    writer.close()
    assert checkpoint.best(tmp_path) == (3, "auc", 0.75, True)
    assert [*checkpoint.steps(tmp_path)] == [4, 3]


def test_an_unexpected_error_of_a_background_save_ends_the_next_step(tmp_path: Path) -> None:
    def write(snapshot: Snapshot) -> None:
        raise ValueError("on purpose")

    writer = make(tmp_path, background=True, write=write)
    checkpoints = WrittenCheckpoints(writer)
    checkpoints.save(snapshot_of(1))
    wait_until(lambda: not writer.busy, "the end of the save", 10)
    with pytest.raises(ValueError, match="on purpose"):
        checkpoints.progress()
    checkpoints.progress()
    checkpoints.close()
