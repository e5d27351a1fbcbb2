"""``mpitrain verify``, ``inspect``, ``diff``, ``export``: their output and exit status."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from mpitrain import checkpoint
from mpitrain.cli.main import main
from mpitrain.core.extra_state import Versioned
from mpitrain.core.layout import Layout

LAYOUT = Layout.pack([("a.weight", (3, 2), "param"), ("a.bias", (2,), "param"), ("n.mean", (2,), "state")])


def save(
    path: Path,
    step: int = 5,
    dtype: str = "float32",
    scale: float = 1.0,
    loss_scale: float | None = None,
    workers: int = 2,
) -> dict[str, np.ndarray]:
    """Write a checkpoint; return its parameters by name."""
    rng = np.random.default_rng(0)
    vectors = {name: np.zeros(LAYOUT.size, dtype) for name in ("params", "velocity", "average")}
    for vector in vectors.values():
        for view in LAYOUT.views(vector).values():
            view[...] = rng.standard_normal(view.shape) * scale
    about = {"mode": "sync", "workers": workers, "config": {"batch_size": 12, "hidden": [3, 4]}}
    extra_state = {} if loss_scale is None else {"loss_scale": Versioned(1, {"scale": loss_scale, "steps": 3.0})}
    checkpoint.write(path, LAYOUT, checkpoint.Snapshot(vectors, step, 345, extra_state), 7, about)
    return LAYOUT.views(vectors["params"])


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory with two checkpoints, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for step in (5, 10):
        save(checkpoint.path_for(Path("run/checkpoints"), step), step)
    return Path("run")


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5000] ^= 1  # after the manifest: in the structure
    path.write_bytes(content)


def test_verify(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run_dir)]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["10", "5"]
    spoil(run_dir / "checkpoints" / "step-0000000010.h5")
    assert main(["verify", str(run_dir)]) == 1
    bad, good = capsys.readouterr().out.splitlines()
    assert bad.startswith("run/checkpoints/step-0000000010.h5 ")
    assert good.startswith("run/checkpoints/step-0000000005.h5: ") and good.endswith(" 5")


@pytest.mark.parametrize("command", [["inspect"], ["export", "--to", "npz"], ["diff", "run"]])
def test_what_does_not_verify_is_reported_in_a_line(run_dir: Path, command: list[str], capsys) -> None:
    spoil(run_dir / "checkpoints" / "step-0000000010.h5")
    assert main([*command, str(run_dir)]) == 1
    output = capsys.readouterr().err
    assert output.startswith("mpitrain: run/checkpoints/step-0000000010.h5 ")
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["verify", "nowhere"], "nowhere "),
        (["inspect", "."], "mpitrain: . "),
        (["export", "run", "--to", "onnx"], "'onnx' is not one of"),
        (["export", "run", "--to", "npz", "--dtype", "bfloat16"], "--to npz "),
        (["export", "run", "--to", "npz", "--output", "a_file/x.npz"], "a_file/x.npz cannot be written"),
        (["export", "run", "--to", "npz", "--output", "run"], "mpitrain: run "),
        (["diff", "run"], "missing argument"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line(run_dir: Path, words: list[str], expected: str, capsys) -> None:
    Path("a_file").write_text("")
    assert main(words) == 2
    output = capsys.readouterr().err
    assert expected in output
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize(("scale", "identical"), [(1.0, True), (2.0, False)])
def test_diff_says_whether_only_the_records_differ(scale: float, identical: bool, run_dir: Path, capsys) -> None:
    save(run_dir / "a.h5")
    save(run_dir / "b.h5", scale=scale, workers=3)
    assert main(["diff", str(run_dir / "a.h5"), str(run_dir / "b.h5")]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert ("identical" in last) == identical
    assert lines == ["/workers: 2 | 3"] if identical else len(lines) > 6


def test_inspect_reports_what_there_is(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = save(checkpoint.path_for(run_dir / "checkpoints", 12345), 12345, loss_scale=4096.0)
    assert main(["inspect", str(run_dir)]) == 0
    output = capsys.readouterr().out
    for part in (
        "step 12,345",
        "position 345",
        "seed 7",
        "mode sync",
        "workers 2",
        "saved ",
        " ago (2",
        "batch_size 12",
        "state/loss_scale: version 1, scale 4096.0, steps 3.0",
    ):
        assert part in output
    row = next(line.split() for line in output.splitlines() if line.startswith("params/a.weight"))
    assert row[1:-1] == ["3", "x", "2", "float32"]
    assert float(row[-1]) == pytest.approx(float(np.linalg.norm(params["a.weight"].astype(float))), rel=1e-5)
    assert "averages/n.mean" in output


def test_diff_reports_where_two_differ(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = Path("a.h5"), Path("b.h5")
    save(a)
    save(b)
    assert main(["diff", str(a), str(b)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    vectors = {name: np.zeros(LAYOUT.size, np.float32) for name in ("params", "velocity", "average")}
    with checkpoint.Checkpoint(a) as opened:
        for group, vector in (("params", "params"), ("optimizer/velocity", "velocity"), ("averages", "average")):
            for name, view in LAYOUT.views(vectors[vector]).items():
                if f"{group}/{name}" in opened.datasets:
                    view[...] = opened.read(f"{group}/{name}")
    LAYOUT.views(vectors["params"])["a.weight"][1, 1] += 0.5
    about = {"mode": "sync", "workers": 3, "run_dir": "elsewhere", "config": {"batch_size": 12, "hidden": [3, 4]}}
    checkpoint.write(b, LAYOUT, checkpoint.Snapshot(vectors, 5, 345), 7, about)
    assert main(["diff", str(a), str(b)]) == 1
    workers, weight = capsys.readouterr().out.splitlines()
    assert workers == "/workers: 2 | 3"
    assert weight.startswith("params/a.weight: 1 of 6 ") and "0.5" in weight


def test_diff_reports_a_different_loss_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("a.h5", "b.h5", "c.h5")]
    for path, loss_scale in zip(paths, (4096.0, 2048.0, None), strict=True):
        save(path, loss_scale=loss_scale)
    for path, value in zip(paths[1:], ("2048.0", "missing"), strict=True):
        assert main(["diff", str(paths[0]), str(path)]) == 1
        assert capsys.readouterr().out.splitlines()[0] == f"run/state/loss_scale/scale: 4096.0 | {value}"


@pytest.mark.parametrize(
    ("to", "dtype"),
    [
        *(("npz", dtype) for dtype in (None, "float64", "float32", "float16")),
        *(("safetensors", dtype) for dtype in (None, "float64", "float32", "float16", "bfloat16")),
    ],
)
def test_export_and_back(tmp_path: Path, to: str, dtype: str | None, capsys) -> None:
    path, target = tmp_path / "step-5.h5", tmp_path / f"out.{to}"
    params = save(path)
    words = ["export", str(path), "--to", to, "--output", str(target), *(["--dtype", dtype] if dtype else [])]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert " 3 arrays " in output and output.endswith(f" {target}\n")
    found = read_back(target)
    assert found.keys() == params.keys()
    for name, values in params.items():
        wanted = values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype or "float32")
        assert found[name].tobytes() == wanted.tobytes()
        assert found[name].shape == wanted.shape


def read_back(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__")["step"] == "5"
    if {entry["dtype"] for entry in header.values()} != {"BF16"}:
        return load_file(path)
    data = content[8 + length :]  # the library's reader has no bfloat16 for NumPy
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], ml_dtypes.bfloat16).reshape(entry["shape"])
        for name, entry in header.items()
    }


def test_export_of_averages(tmp_path: Path) -> None:
    path = tmp_path / "step-5.h5"
    save(path)
    assert main(["export", str(path), "--to", "npz", "--averages", "--output", str(tmp_path / "x.npz")]) == 0
    with checkpoint.Checkpoint(path) as opened:
        assert read_back(tmp_path / "x.npz")["a.bias"].tobytes() == opened.read("averages/a.bias").tobytes()


def test_the_default_name_of_an_export_contains_the_runs_name(run_dir: Path) -> None:
    assert main(["export", str(run_dir), "--to", "npz"]) == 0
    save(Path("step-5.h5"))
    assert main(["export", "step-5.h5", "--to", "npz"]) == 0
    assert {path.name for path in Path().glob("*.npz")} == {"run-step-0000000010.npz", "step-5.npz"}


def test_export_does_not_make_weights_infinite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step-5.h5"
    save(path, scale=1e6)
    words = ["export", str(path), "--to", "npz", "--output", str(tmp_path / "x.npz"), "--dtype"]
    assert main([*words, "float16"]) == 2
    assert "too large for float16" in capsys.readouterr().err
    assert not (tmp_path / "x.npz").exists()
