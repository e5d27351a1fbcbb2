"""States in memory: reading returns the newest complete state, from any folder that had room."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint import Snapshot
from mpitrain.checkpoint.memory import StateWriter, newest_state, read_state, save_as_checkpoint, state_key, states
from mpitrain.checkpoint.summary import differences
from mpitrain.core.extra_state import Versioned
from mpitrain.core.layout import Layout
from mpitrain.process import state_folder

LAYOUT = Layout.pack([("a", (3, 5), "param"), ("b", (), "param"), ("s", (7,), "state")])
RECORD = {"mode": "sync", "run": {"train_steps": 7, "data_dir": "x"}}
KEY = state_key(LAYOUT, ("params", "m"), np.float32, 0)


@pytest.fixture
def run_dir(tmp_path: Path):
    yield str(tmp_path)
    state_folder.remove(str(tmp_path))
    assert not state_folder.existing(str(tmp_path))


def snapshot_of(step: int, n_extra: int = 3) -> Snapshot:
    vectors = {name: np.random.default_rng(step).random(LAYOUT.size, np.float32) for name in ("params", "m")}
    values = {
        "loss": float("nan"),
        "steps": 2**60,
        "name": "ä/b",
        "is": True,
        "x": np.arange(n_extra),
        "y": np.float16(2),
    }
    return Snapshot(vectors, step, 10 * step, {"hooks/of a": Versioned(3, values), "empty": Versioned(1, {})})


def read_back(run_dir: str, step: int) -> None:
    kept = newest_state(run_dir)
    assert kept is not None and kept.step == step
    vectors = {name: np.full(LAYOUT.size, np.nan, np.float32) for name in ("params", "m")}
    progress, extra = read_state(kept.path, vectors, 3)
    assert all(np.isnan(vector[:3]).all() and not np.isnan(vector[3:]).any() for vector in vectors.values())
    read_state(kept.path, vectors, 0, 3)
    expected = snapshot_of(step)
    assert progress == (step, 10 * step)
    assert all(vectors[name].tobytes() == expected.vectors[name].tobytes() for name in vectors)
    values, written = extra["hooks/of a"].values, expected.extra_state["hooks/of a"].values
    assert extra.keys() == expected.extra_state.keys() and extra["hooks/of a"].version == 3
    assert values.keys() == written.keys()
    assert all(np.array_equal(values[name], written[name], equal_nan=name == "loss") for name in values)
    assert values["x"].dtype == np.int64 and values["y"].dtype == np.float16 and values["is"] is True


def test_the_newest_state_is_read(run_dir: str) -> None:
    assert newest_state(run_dir) is None
    writer = StateWriter(run_dir, KEY, LAYOUT, 0, RECORD)
    for step in (1, 2, 5):
        writer.write(snapshot_of(step))
        read_back(run_dir, step)
    assert [state.step for state in states(run_dir)] == [5, 2]
    again = StateWriter(run_dir, KEY, LAYOUT, 0, RECORD)  # after a restart
    again.write(snapshot_of(6))
    assert [state.step for state in states(run_dir)] == [6, 5]
    again.remove()
    assert not states(run_dir)


def test_a_state_is_saved_as_the_checkpoint_of_its_step(run_dir: str, tmp_path: Path) -> None:
    StateWriter(run_dir, KEY, LAYOUT, 0, RECORD).write(snapshot_of(3))
    saved = save_as_checkpoint(states(run_dir)[0], tmp_path / "saved")
    checkpoint.write(tmp_path / "written.h5", LAYOUT, snapshot_of(3), 0, RECORD)
    with checkpoint.Checkpoint(saved) as a, checkpoint.Checkpoint(tmp_path / "written.h5") as b:
        assert saved.name == checkpoint.path_for(tmp_path, 3).name
        assert {**a.attributes["/"], "saved_at": ""} == {**b.attributes["/"], "saved_at": ""}
        assert not [name for name, description in differences(a, b) if description != "nan | nan"]


def test_an_incomplete_state_is_not_read(run_dir: str) -> None:
    writer = StateWriter(run_dir, KEY, LAYOUT, 0, RECORD)
    for step in (1, 2):
        writer.write(snapshot_of(step))
    newest = newest_state(run_dir)
    assert newest is not None
    content = newest.path.read_bytes()
    newest.path.write_bytes(content[:16] + bytes(8) + content[24:])
    assert [state.step for state in states(run_dir)] == [1]
    for damaged in (b"", content[:30], content[:-20000], bytes(len(content))):
        newest.path.write_bytes(damaged)
        assert [state.step for state in states(run_dir)] == [1]


def test_a_state_that_is_being_overwritten_is_not_read(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step of a write, in which the process may be killed, there is the state before it, as a whole."""
    writer, copy = StateWriter(run_dir, KEY, LAYOUT, 0, RECORD), np.copyto
    written, copies = 0, 0

    def look(*arrays: np.ndarray) -> None:
        nonlocal copies
        if written:
            read_back(run_dir, written)
        assert [state.step for state in states(run_dir)] == [written][:written]
        copies += 1
        copy(*arrays)

    with monkeypatch.context() as patch:
        patch.setattr(np, "copyto", look)
        for step in range(1, 5):
            writer.write(snapshot_of(step))
            written = step
    assert copies == 4 * 4  # two vectors and two arrays of each state


def test_states_grow_with_the_extra_state(run_dir: str) -> None:
    writer = StateWriter(run_dir, KEY, LAYOUT, 0, RECORD)
    for step in range(1, 5):
        writer.write(snapshot_of(step, n_extra=100_000 * step))
    vectors = snapshot_of(0).vectors
    _, extra = read_state(states(run_dir)[0].path, dict(vectors))
    assert np.array_equal(extra["hooks/of a"].values["x"], np.arange(400_000))


def test_other_runs_have_other_keys(run_dir: str) -> None:
    StateWriter(run_dir, KEY, LAYOUT, 0, RECORD).write(snapshot_of(1))
    others = Layout.pack([("a", (5, 3), "param"), ("b", (), "param"), ("s", (7,), "state")])
    for other in (
        state_key(others, ("params", "m"), np.float32, 0),
        state_key(LAYOUT, ("params",), np.float32, 0),
        state_key(LAYOUT, ("params", "m"), np.float64, 0),
        state_key(LAYOUT, ("params", "m"), np.float32, 1),
    ):
        assert not states(run_dir, other)
    assert len(states(run_dir, state_key(LAYOUT, ("m", "params"), np.float32, 0))) == 1


@pytest.mark.full
def test_a_state_that_does_not_fit_goes_elsewhere_or_is_refused(
    tmp_path: Path, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    for folder, size in ((small, "64k"), (large, "10m")):
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        monkeypatch.setattr(state_folder, "_SHM", small)
        monkeypatch.setattr(state_folder.tempfile, "gettempdir", lambda: str(large))
        writer = StateWriter(run_dir, KEY, LAYOUT, 0, RECORD)
        writer.write(snapshot_of(1))
        assert newest_state(run_dir).path.is_relative_to(small)
        writer.write(snapshot_of(2, n_extra=20_000))
        assert newest_state(run_dir).path.is_relative_to(large)
        with pytest.raises(OSError, match="space"):
            writer.write(snapshot_of(3, n_extra=20_000_000))
        assert newest_state(run_dir).step == 2
        writer.remove()
        assert not any(small.iterdir()) and not any(large.iterdir())
    finally:
        for folder in (small, large):
            subprocess.run(["umount", str(folder)], check=True)


def test_the_folder_of_another_user_is_refused(tmp_path: Path, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_folder, "_SHM", tmp_path)
    monkeypatch.setattr(state_folder.tempfile, "gettempdir", lambda: str(tmp_path / "absent"))
    parent = tmp_path / f"mpitrain-states-{os.geteuid()}"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(FileNotFoundError):  # the folder that is tried next does not exist
        StateWriter(run_dir, KEY, LAYOUT, 0, RECORD).write(snapshot_of(1))
    parent.rmdir()
    parent.symlink_to(tmp_path)
    with pytest.raises(FileNotFoundError):
        StateWriter(run_dir, KEY, LAYOUT, 0, RECORD).write(snapshot_of(1))
    assert not states(run_dir)


def test_states_without_a_run_directory_are_removed(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    StateWriter(str(gone), KEY, LAYOUT, 0, RECORD).write(snapshot_of(1))
    state_folder.remove_orphans()
    assert states(str(gone))
    gone.rmdir()
    state_folder.remove_orphans()
    assert not state_folder.existing(str(gone))
