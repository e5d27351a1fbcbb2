"""Checkpoints: the package and other programs read the written content, and mismatches are named."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint.container import Compression, write_container
from mpitrain.checkpoint.state import compare, contents
from mpitrain.core.extra_state import ExtraState, Versioned, values_of
from mpitrain.core.layout import Layout
from mpitrain.errors import CheckpointError, DamagedCheckpoint, JobError

from ...support.launch import missing, run

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


SCALE = {"loss_scale": Versioned(2, {"scale": 4096.0, "steps": 3.0}), "other": Versioned(1, {"text": "a"})}
BRACKETS = {"hooks": Versioned(1, {"states": "[" * 32_768})}


@pytest.mark.parametrize("extra_state", [None, SCALE, BRACKETS])
def test_what_is_written_is_read(tmp_path: Path, extra_state: ExtraState | None) -> None:
    path, written = checkpoint.path_for(tmp_path / "new", 12), vectors()
    checkpoint.write(path, LAYOUT, checkpoint.Snapshot(written, 12, 345, extra_state), 7, {"mode": "sync"})
    read = {name: np.zeros(LAYOUT.size) for name in written}
    assert checkpoint.read(path, LAYOUT, read, 7) == ((12, 345), extra_state or {})
    for name in written:
        if name == "square":  # layer state has no slots
            written[name][LAYOUT.n_trained :] = 0
        assert read[name].tobytes() == written[name].tobytes()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_message_has_few_differences_and_those_of_parameters_first() -> None:
    names = [f"{group}/{name}" for group in ("optimizer/mean", "params") for name in "abcd"]
    fit = compare(dict.fromkeys(names, (2, 3)), dict.fromkeys(names[:-1], (2, 4)))
    shown = fit.first_differences().split("; ")
    assert [difference.partition(" ")[0] for difference in shown[:3]] == ["params/a", "params/b", "params/c"]
    assert len(shown) == 4 and "5" in shown[3]


def test_state_in_another_byte_order_is_read(tmp_path: Path) -> None:
    path, values = tmp_path / "a.h5", np.arange(3, dtype=">f4")
    checkpoint.write(path, LAYOUT, checkpoint.Snapshot(vectors(), 1, 0, {"x": Versioned(1, {"a": values})}), 0, {})
    checkpoint.verify(path)
    assert checkpoint.read(path, LAYOUT, vectors(), 0).extra_state["x"].values["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["complex64", "longdouble", "S1"])
def test_state_that_cannot_be_read_is_not_written(tmp_path: Path, dtype: str) -> None:
    state = {"x": Versioned(1, {"a": np.zeros(3, dtype)})}
    with pytest.raises(JobError, match="x/a"):
        checkpoint.write(tmp_path / "a.h5", LAYOUT, checkpoint.Snapshot(vectors(), 1, 0, state), 0, {})


def test_the_newest_is_of_the_highest_step(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    for step in (9, 100, 20):
        checkpoint.write(checkpoint.path_for(tmp_path, step), LAYOUT, checkpoint.Snapshot(vectors(), step, 0), 0, {})
    assert checkpoint.newest(tmp_path) == checkpoint.path_for(tmp_path, 100)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            [("a.weight", (3, 3), "param"), ("a.bias", (2,), "param"), ("n.mean", (2,), "state")],
            ["params/a.weight ", "(3, 2)"],
        ),
        ([("a.weight", (3, 2), "param"), ("n.mean", (2,), "state")], ["params/a.bias "]),
        ([("a.weight", (3, 2), "param"), ("c", (1,), "param"), ("n.mean", (2,), "state")], ["params/c "]),
    ],
)
def test_another_model_is_named(tmp_path: Path, other, expected: list[str]) -> None:
    path = tmp_path / "step-1.h5"
    checkpoint.write(path, LAYOUT, checkpoint.Snapshot({"params": vectors()["params"]}, 1, 0), 0, {})
    layout = Layout.pack(other)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(path, layout, {"params": np.zeros(layout.size)}, 0)
    assert all(part in str(caught.value) for part in expected)


def test_another_optimizer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step-1.h5"
    checkpoint.write(path, LAYOUT, checkpoint.Snapshot({"params": vectors()["params"]}, 1, 0), 0, {})
    with pytest.raises(CheckpointError, match=r" params, .* optimizer/velocity"):
        checkpoint.read(path, LAYOUT, {"velocity": np.zeros(LAYOUT.size)}, 0)


def test_another_seed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step-1.h5"
    checkpoint.write(path, LAYOUT, checkpoint.Snapshot(vectors(), 1, 0), 5, {})
    with pytest.raises(CheckpointError, match="--seed 5"):
        checkpoint.read(path, LAYOUT, vectors(), 6)


def test_what_has_other_contents_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step-1.h5"
    for damage in ("group", "text", "attribute"):
        checkpoint.write(path, LAYOUT, checkpoint.Snapshot(vectors(), 1, 0), 0, {})
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


@pytest.mark.parametrize("content", [b"", b"not hdf5" * 1000, b"mpitrain checkpoint 2\n", b"mpitrain checkpoint 1\n"])
def test_what_is_no_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "step-1.h5"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"step-1\.h5"):
        checkpoint.read(path, LAYOUT, vectors(), 0)


def test_hdf5_files_of_others_are_named(tmp_path: Path) -> None:
    path = tmp_path / "step-1.h5"
    with h5py.File(path, "w") as file:
        file["params/a.weight"] = np.zeros((3, 2))
    with pytest.raises(DamagedCheckpoint, match=r"step-1\.h5 .* mpitrain"):
        checkpoint.read(path, LAYOUT, vectors(), 0)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(DamagedCheckpoint, match=r"(is not a regular file|cannot be read: No such file)"):
            checkpoint.read(path, LAYOUT, vectors(), 0)


def test_a_file_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    path = checkpoint.path_for(tmp_path, 10)
    checkpoint.write(path, LAYOUT, checkpoint.Snapshot(vectors(), 10, 0), 0, {})
    path = path.rename(checkpoint.path_for(tmp_path, 11))
    with pytest.raises(DamagedCheckpoint, match=r"step-0000000011\.h5 .*step 10"):
        checkpoint.verify(path)
    checkpoint.verify(path.rename(tmp_path / "best.h5"))  # a name without a step


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_every_shape_and_type_is_kept(tmp_path: Path, compression: Compression) -> None:
    layout = Layout.pack([("scalar", (), "param"), ("empty", (0, 3), "param"), ("größe", (2, 1, 3), "param")])
    for dtype in ("float32", "float64"):
        written = {"params": np.arange(layout.size, dtype=dtype)}
        checkpoint.write(tmp_path / "a.h5", layout, checkpoint.Snapshot(written, 1, 0), 0, {}, compression)
        read = {"params": np.zeros(layout.size, dtype)}
        checkpoint.read(tmp_path / "a.h5", layout, read, 0)
        for name, view in layout.views(read["params"]).items():
            assert view.tobytes() == layout.views(written["params"])[name].tobytes()
        with checkpoint.Checkpoint(tmp_path / "a.h5") as opened:
            assert opened.datasets["params/größe"].dtype == np.dtype(dtype)


def test_values_are_converted_where_the_type_is_another(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "a.h5", LAYOUT, checkpoint.Snapshot(vectors(), 1, 0), 0, {})
    read = {name: np.zeros(LAYOUT.size, np.float32) for name in vectors()}
    checkpoint.read(tmp_path / "a.h5", LAYOUT, read, 0)
    np.testing.assert_array_equal(read["params"], vectors()["params"].astype(np.float32))


@pytest.mark.parametrize("size", [1, 4096, (1 << 21) - 1, 1 << 21, (1 << 21) + 1, 5_000_001])
def test_sizes_around_those_of_pieces(tmp_path: Path, size: int) -> None:
    layout = Layout.pack([("a", (size,), "param"), ("b", (3,), "param")])
    written = {"params": np.arange(layout.size, dtype=np.float32)}
    checkpoint.write(tmp_path / "a.h5", layout, checkpoint.Snapshot(written, 1, 0), 0, {})
    read = {"params": np.zeros(layout.size, np.float32)}
    checkpoint.read(tmp_path / "a.h5", layout, read, 0)
    for name, view in layout.views(read["params"]).items():
        assert view.tobytes() == layout.views(written["params"])[name].tobytes()


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_other_readers_of_hdf5_read_it(tmp_path: Path, compression: Compression) -> None:
    path, written = tmp_path / "step-0000000012.h5", vectors()
    about = {"mode": "sync", "config": {"batch_size": 12, "rates": [0.1, 0.2]}}
    checkpoint.write(path, LAYOUT, checkpoint.Snapshot(written, 12, 345), 7, about, compression)
    with h5py.File(path) as file:
        for name, group in (("params", "params"), ("square", "optimizer/square"), ("average", "averages")):
            for entry, dataset in file[group].items():
                assert dataset[()].tobytes() == LAYOUT.views(written[name])[entry].tobytes()
        assert (file.attrs["step"], file.attrs["position"], file.attrs["seed"]) == (12, 345, 7)
        assert dict(file["run/config"].attrs) == {"batch_size": 12, "rates": "[0.1, 0.2]"}
        assert file["params/n.mean"].attrs["kind"] == "state"


@pytest.mark.full
def test_h5dump_reads_it(tmp_path: Path) -> None:
    path, written = tmp_path / "step-0000000012.h5", vectors()
    checkpoint.write(path, LAYOUT, checkpoint.Snapshot(written, 12, 345), 7, {}, "none")
    if shutil.which("h5dump") is None:
        missing("h5dump, of Debian's package hdf5-tools")
    dumped = run(["h5dump", "-d", "/params/a.bias", "-m", "%.17g", "-w", "0", str(path)])
    assert dumped.returncode == 0, dumped.stderr
    values = re.findall(r"^ *\(0\): (.*)$", dumped.stdout, re.MULTILINE)[0]  # attributes follow
    assert [float(value) for value in values.split(",")] == LAYOUT.views(written["params"])["a.bias"].tolist()


def test_gzip_makes_it_smaller(tmp_path: Path) -> None:
    layout = Layout.pack([("a", (100_000,), "param")])
    for compression in ("none", "gzip"):
        path = tmp_path / f"{compression}.h5"
        checkpoint.write(path, layout, checkpoint.Snapshot({"params": np.ones(layout.size)}, 1, 0), 0, {}, compression)
        checkpoint.verify(path)
    assert (tmp_path / "gzip.h5").stat().st_size < (tmp_path / "none.h5").stat().st_size / 10


def test_what_fits_is_taken_and_the_rest_named(tmp_path: Path) -> None:
    path, there = tmp_path / "a.h5", vectors()["params"]
    checkpoint.write(path, LAYOUT, checkpoint.Snapshot({"params": there}, 1, 0), 0, {})
    layout = Layout.pack([("a.weight", (3, 2), "param"), ("a.bias", (4,), "param"), ("head", (2,), "param")])
    params = np.ones(layout.size)
    fit = checkpoint.load_matching(path, layout, params)
    assert fit.fitting == ("a.weight",)
    assert (fit.missing, fit.unexpected) == (("head",), ("n.mean",))
    assert fit.reshaped == {"a.bias": ((2,), (4,))}
    parts = [part.split()[0] for part in str(fit).split("; ")]
    assert parts == ["a.bias", "head", "n.mean"]
    views = layout.views(params)
    assert views["a.weight"].tobytes() == LAYOUT.views(there)["a.weight"].tobytes()
    assert (views["a.bias"] == 1).all() and (views["head"] == 1).all()
    with pytest.raises(CheckpointError, match=f"--init-from {path}: .*head"):
        checkpoint.load_matching(path, Layout.pack([("head", (2,), "param")]), np.ones(16))


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step-1.h5"
    checkpoint.write(path, LAYOUT, checkpoint.Snapshot(vectors(), 1, 0), 0, {})
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)  # simulates a full disk
    with pytest.raises(OSError, match="No space"):
        checkpoint.write(path, LAYOUT, checkpoint.Snapshot(vectors(), 1, 99), 0, {})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], stderr=subprocess.DEVNULL, check=False
        ).returncode
    )
    if not mounted:
        missing("the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_full_disk_leaves_what_was_there(small_disk: Path, compression: Compression) -> None:
    layout = Layout.pack([("a", (100_000,), "param")])
    state = {"params": np.random.default_rng(0).standard_normal(layout.size, np.float32)}

    def save(step: int) -> None:
        snapshot = checkpoint.Snapshot(state, step, 0)
        checkpoint.write(checkpoint.path_for(small_disk, step), layout, snapshot, 0, {}, compression)

    for step in (1, 2):  # of 400 kB each
        save(step)
    with pytest.raises(OSError, match="No space left") as caught:
        save(3)
    assert caught.value.errno == errno.ENOSPC
    assert [*checkpoint.steps(small_disk)] == [2, 1]
    assert len([*small_disk.iterdir()]) == 2
    checkpoint.verify(checkpoint.path_for(small_disk, 2))


def test_a_folder_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")  # a file in place of the folder, because root may write everywhere
    with pytest.raises(FileExistsError):
        checkpoint.write(tmp_path / "file" / "step-1.h5", LAYOUT, checkpoint.Snapshot(vectors(), 1, 0), 0, {})


def test_state_of_version_0_1_without_namespaces_is_read(tmp_path: Path) -> None:
    path, written = tmp_path / "a.h5", vectors()
    arrays, attributes = contents(LAYOUT, checkpoint.Snapshot(written, 1, 2), 0, {})
    hooks = '[["Best", {"loss": 0.5}]]'
    attributes["run/state"] = {"loss_scale": 64.0, "loss_scale_steps": 3.0, "transport_ipc": 1.0, "hooks": hooks}
    write_container(path, arrays, attributes)
    _, extra_state = checkpoint.read(path, LAYOUT, written, 0)
    assert extra_state == {
        "loss_scale": Versioned(1, {"scale": 64.0, "steps": 3.0}),
        "gpu_transport": Versioned(1, {"name": "ipc"}),
        "hooks": Versioned(1, {"states": hooks}),
    }


def test_state_of_a_later_version_is_refused_by_the_part_that_reads_it() -> None:
    state = {"hooks": Versioned(2, {"states": "[]"})}
    assert values_of(state, "hooks", 2) and not values_of(state, "loss_scale", 1)
    with pytest.raises(CheckpointError, match=r"version 2 of the state hooks.* version 1 or less"):
        values_of(state, "hooks", 1)


def test_arrays_are_extra_state_like_numbers(tmp_path: Path) -> None:
    state = {
        "buffers": Versioned(3, {"norm.seen": np.arange(4)}),
        "transient": Versioned(1, {"mask": np.ones(2)}),
        "compression": Versioned(2, {"residual": np.arange(30_000.0), "step": 7, "kind": "a", "empty": np.zeros(0)}),
    }
    path, written = tmp_path / "a.h5", vectors()
    checkpoint.write(path, LAYOUT, checkpoint.Snapshot(written, 1, 2, state), 0, {})
    _, restored = checkpoint.read(path, LAYOUT, written, 0)
    assert restored.keys() == state.keys()
    for namespace, part in state.items():
        assert restored[namespace].version == part.version and restored[namespace].values.keys() == part.values.keys()
        for name, value in part.values.items():
            assert np.array_equal(restored[namespace].values[name], value)


@pytest.mark.parametrize("part", [Versioned(1, {"version": 5.0}), Versioned("1", {"x": 1.0})], ids=str)  # type: ignore[arg-type]
def test_state_that_could_not_be_read_is_not_written(tmp_path: Path, part: Versioned) -> None:
    with pytest.raises(JobError, match="the state mine"):
        checkpoint.write(tmp_path / "a.h5", LAYOUT, checkpoint.Snapshot(vectors(), 1, 2, {"mine": part}), 0, {})
