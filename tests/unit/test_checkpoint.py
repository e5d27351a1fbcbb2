"""Checkpoints: what is written is read, and what does not fit is named."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.errors import CheckpointError
from mpitrain.params import Layout

LAYOUT = Layout.pack([("a.weight", (3, 2), "param"), ("a.bias", (2,), "param"), ("n.mean", (2,), "state")])


def vectors(layout: Layout = LAYOUT) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal(layout.size) for name in ("params", "square", "average")}
    for vector in made.values():  # gaps hold zeros
        held = {name: view.copy() for name, view in layout.views(vector).items()}
        vector[:] = 0
        for name, view in layout.views(vector).items():
            view[...] = held[name]
    return made


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path, written = checkpoint.path_for(tmp_path / "new", 12), vectors()
    checkpoint.write(path, LAYOUT, written, 12, 345, 7, {"mode": "sync"})
    read = {name: np.zeros(LAYOUT.size) for name in written}
    assert checkpoint.read(path, LAYOUT, read, 7) == (12, 345)
    for name in written:
        if name == "square":  # state has no slots
            written[name][LAYOUT.n_trained :] = 0
        assert read[name].tobytes() == written[name].tobytes()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_newest_is_of_the_highest_step(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    for step in (9, 100, 20):
        checkpoint.write(checkpoint.path_for(tmp_path, step), LAYOUT, vectors(), step, 0, 0, {})
    assert checkpoint.newest(tmp_path) == checkpoint.path_for(tmp_path, 100)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ([("a.weight", (3, 3), "param"), ("a.bias", (2,), "param"), ("n.mean", (2,), "state")], "a.weight is (3, 2)"),
        ([("a.weight", (3, 2), "param"), ("n.mean", (2,), "state")], "a.bias is not in the model"),
        ([("a.weight", (3, 2), "param"), ("c", (1,), "param"), ("n.mean", (2,), "state")], "c is missing"),
    ],
)
def test_another_model_is_named(tmp_path: Path, other, told: str) -> None:
    path = tmp_path / "step-1.h5"
    checkpoint.write(path, LAYOUT, {"params": vectors()["params"]}, 1, 0, 0, {})
    layout = Layout.pack(other)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(path, layout, {"params": np.zeros(layout.size)}, 0)
    assert told in str(caught.value)


def test_another_optimizer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step-1.h5"
    checkpoint.write(path, LAYOUT, {"params": vectors()["params"]}, 1, 0, 0, {})
    with pytest.raises(CheckpointError, match="holds params, and this run has optimizer/velocity"):
        checkpoint.read(path, LAYOUT, {"velocity": np.zeros(LAYOUT.size)}, 0)


def test_another_seed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step-1.h5"
    checkpoint.write(path, LAYOUT, vectors(), 1, 0, 5, {})
    with pytest.raises(CheckpointError, match="--seed 5"):
        checkpoint.read(path, LAYOUT, vectors(), 6)


def test_what_has_other_contents_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step-1.h5"
    for damage in ("group", "text", "attribute"):
        checkpoint.write(path, LAYOUT, vectors(), 1, 0, 0, {})
        with h5py.File(path, "a") as file:
            if damage == "attribute":
                file.attrs["step"] = "abc"
                continue
            del file["params/a.weight"]
            if damage == "group":
                file.create_group("params/a.weight")
            else:
                file["params/a.weight"] = np.full((3, 2), b"text")
        with pytest.raises(CheckpointError, match=r"step-1\.h5"):
            checkpoint.read(path, LAYOUT, vectors(), 0)


@pytest.mark.parametrize("content", [b"", b"not hdf5" * 1000])
def test_what_is_no_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "step-1.h5"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-1\.h5"):
        checkpoint.read(path, LAYOUT, vectors(), 0)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step-1.h5"
    checkpoint.write(path, LAYOUT, vectors(), 1, 0, 0, {})
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)  # stands in for a disk that is full
    with pytest.raises(OSError, match="No space"):
        checkpoint.write(path, LAYOUT, vectors(), 1, 99, 0, {})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
