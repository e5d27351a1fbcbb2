"""Sharded checkpoints: read by this package and by HDF5, and with a shard that is damaged, swapped or missing."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint.sharded import ShardedWriter, ShardSpec, rows_of_shard
from mpitrain.core.extra_state import Versioned
from mpitrain.core.layout import Array, Layout
from mpitrain.errors import CheckpointError, DamagedCheckpoint

SHAPES = {"scalar": (), "one": (1,), "matrix": (23, 7), "cube": (2, 3, 5), "long": (1001,)}
LAYOUT = Layout.pack([(name, shape, "param") for name, shape in SHAPES.items()])
STATE = {"loss_scale": Versioned(1, {"scale": 4096.0, "steps": 3.0})}
RESIDUAL = np.arange(4000.0)


def state(seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    vectors = {name: np.zeros(LAYOUT.size, np.float32) for name in ("params", "momentum")}
    for vector in vectors.values():
        for view in LAYOUT.views(vector).values():
            view[...] = rng.standard_normal(view.shape)
    return vectors


def write(
    folder: Path, vectors: Mapping[str, Array], count: int, step: int = 5, token: str = "abc123", gzip: bool = False
) -> Path:
    compression = "gzip" if gzip else "none"
    writers = [
        ShardedWriter(folder, LAYOUT, 0, {"mode": "sync"}, compression, ShardSpec(index, count, token))  # type: ignore[arg-type]
        for index in range(count)
    ]
    for writer in writers:
        writer.write(
            checkpoint.Snapshot(vectors, step, 2 * step, STATE | {"compression": Versioned(1, {"residual": RESIDUAL})})
        )
    writers[0].write_index()
    return checkpoint.path_for(folder, step)


def load(path: Path) -> dict[str, Array]:
    found = {name: np.zeros(LAYOUT.size, np.float32) for name in ("params", "momentum")}
    progress, extra_state = checkpoint.read(path, LAYOUT, found, 0)
    compression = extra_state.pop("compression")  # type: ignore[attr-defined]
    assert (progress, extra_state) == ((5, 10), STATE)
    assert np.array_equal(compression.values["residual"], RESIDUAL)
    return found


def same(a: Mapping[str, Array], b: Mapping[str, Array]) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("gzip", [False, True])
def test_what_is_read_is_what_was_written(tmp_path: Path, count: int, gzip: bool) -> None:
    path = write(tmp_path, state(), count, gzip=gzip)
    assert same(load(path), state())
    checkpoint.verify(path)
    with checkpoint.Checkpoint(path) as opened:
        assert opened.read("params/matrix").shape == (23, 7)
        wide = np.zeros((23, 7))
        opened.read_into({"params/matrix": wide})
        assert np.array_equal(wide, opened.read("params/matrix"))


def test_any_reader_of_hdf5_sees_whole_arrays(tmp_path: Path) -> None:
    path = write(tmp_path, state(), 3)
    views = LAYOUT.views(state()["params"])
    with h5py.File(path) as file:
        for name, view in views.items():
            assert np.array_equal(file[f"params/{name}"][()], view)


@pytest.mark.full
def test_h5dump_sees_whole_arrays(tmp_path: Path) -> None:
    path = write(tmp_path, state(), 3)
    views = LAYOUT.views(state()["params"])
    dumped = subprocess.run(
        ["h5dump", "-d", "/params/matrix", "-y", "-m", "%.9g", str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert f"{views['matrix'][22, 6]:.9g}" in dumped


def test_parts_are_of_equal_size(tmp_path: Path) -> None:
    arrays = {"a": (1000, 8), "b": (3, 4000), "c": (1, 4)}
    for count in (1, 2, 3, 7):
        shards = [rows_of_shard(arrays, ShardSpec(index, count, "")) for index in range(count)]
        for name, (rows, _) in arrays.items():
            held = [shard[name] for shard in shards if name in shard]
            assert [lo for lo, _ in held] == [0, *(hi for _, hi in held[:-1])]
            assert held[-1][1] == rows
        sizes = [sum((hi - lo) * arrays[name][1] for name, (lo, hi) in shard.items()) for shard in shards]
        assert max(sizes) - min(sizes) <= 4000 + 4000


def test_a_damaged_part_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, state(), 2)
    shard = checkpoint.shard_paths(path)[0]
    data = bytearray(shard.read_bytes())
    data[-10] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=shard.name):
        checkpoint.verify(path)
    with pytest.raises(DamagedCheckpoint, match=shard.name):
        load(path)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, state(), 2)
    shard = checkpoint.shard_paths(path)[0]
    shard.unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{shard.name} cannot be read"):
        load(path)


def test_a_part_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a", state(), 2)
    other = write(tmp_path / "b", state(1), 2)
    checkpoint.shard_paths(other)[1].replace(checkpoint.shard_paths(path)[1])
    with pytest.raises(DamagedCheckpoint, match=checkpoint.shard_paths(path)[1].name):
        load(path)


def test_parts_alone_are_no_checkpoint_and_go(tmp_path: Path) -> None:
    writer = ShardedWriter(tmp_path, LAYOUT, 0, {}, "none", ShardSpec(0, 2, "0a"))
    writer.write(checkpoint.Snapshot(state(), 5, 10))
    assert not checkpoint.steps(tmp_path)
    with pytest.raises(OSError, match="2-of-2"):
        writer.write_index()  # the other shard is missing
    assert not checkpoint.steps(tmp_path)
    whole = write(tmp_path, state(), 2, step=7)
    checkpoint.remove_unfinished(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([whole, *checkpoint.shard_paths(whole)])


def test_written_again_by_another_run_it_is_the_other_run_s(tmp_path: Path) -> None:
    write(tmp_path, state(1), 3, token="aa")
    path = write(tmp_path, state(2), 2, token="bb")
    assert same(load(path), state(2))
    assert len(checkpoint.shard_paths(path)) == 2


def test_parts_go_with_their_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, state(), 2, step=step)
    checkpoint.Retention(1).prune(tmp_path)
    assert [*checkpoint.steps(tmp_path)] == [3]
    assert len([*tmp_path.iterdir()]) == 3


def test_a_checkpoint_with_a_damaged_part_is_skipped(tmp_path: Path) -> None:
    older, newer = write(tmp_path, state(), 2, step=1), write(tmp_path, state(), 2, step=2)
    shard = checkpoint.shard_paths(newer)[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    found, skipped = checkpoint.first_intact([newer, older], checkpoint.verify)
    assert found == (older, None)
    assert shard.name in skipped[0]


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, state(), 2)
    other = Layout.pack([("matrix", (23, 8), "param")])
    with pytest.raises(CheckpointError, match=r"params/matrix .*\(23, 7\).*\(23, 8\)"):
        checkpoint.read(path, other, {n: np.zeros(other.size) for n in ("params", "momentum")}, 0)
