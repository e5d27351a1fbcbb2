"""Whole runs on a GPU, one rank, and two that share it where there is an mpirun: against processors, and each other."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

if importlib.util.find_spec("cupy") is None:
    pytest.skip("CuPy is not installed", allow_module_level=True)

import cupy

if not cupy.is_available():
    pytest.skip("no NVIDIA GPU", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "tests" / "support" / "jobs" / "small.py"
CNN = ROOT / "jobs" / "fashion_cnn.py"
MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))

pytestmark = pytest.mark.gpu


def train(n: int, folder: Path, job: Path, *flags: str) -> tuple[str, dict[str, np.ndarray]]:
    """Return the output of a run and the values of its last checkpoint."""
    launcher = []
    if n > 1:
        if MPIRUN is None:
            pytest.skip("no mpirun")
        launcher = [MPIRUN, "-n", str(n), "--oversubscribe", "--bind-to", "none"]
    words = [*launcher, sys.executable, "-m", "mpitrain", "train", str(job), "--run-dir", str(folder)]
    words += ["--train-steps", "20", "--validate-steps", "10", *flags]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(words, env={**os.environ, **root}, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, np.ndarray] = {}
    with h5py.File(max((folder / "checkpoints").glob("step-*.h5"))) as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return done.stdout, found


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        error, size = np.abs(found[name] - values).max(), np.abs(values).max()
        assert error <= tolerance * size, f"{name} differs by {error:.2g}, and its largest is {size:.2g}"


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--no-normalize", "--accumulate-steps", "2"],
        ["--clip-norm", "0.5"],
        ["--optimizer", "lamb"],
        ["--mode", "local"],
        ["--mode", "async"],
    ],
    ids=" ".join,
)
def test_agrees_with_the_processor(flags: list[str], tmp_path: Path) -> None:
    more = ["--dtype", "float64", *flags]
    _, here = train(1, tmp_path / "cpu", SMALL, "--device", "cpu", *more)
    output, there = train(1, tmp_path / "gpu", SMALL, "--device", "gpu", *more)
    assert_close(there, here, 1e-9)
    assert "CUDA graphs" not in output


def test_convolutions_agree_with_the_processor(tmp_path: Path) -> None:
    more = ["--batch-size", "32"]
    _, here = train(1, tmp_path / "cpu", CNN, "--device", "cpu", "--dtype", "float64", *more)
    _, there = train(1, tmp_path / "gpu", CNN, "--device", "gpu", "--dtype", "float64", *more)
    assert_close(there, here, 1e-8)
    train(1, tmp_path / "single", CNN, "--device", "gpu", *more)


@pytest.mark.parametrize("precision", ["tf32", "bfloat16", "float16"])
def test_lower_precision_learns(precision: str, tmp_path: Path) -> None:
    flags = ["--device", "gpu", "--train-steps", "300", "--precision", precision]
    output, _ = train(1, tmp_path, SMALL, *flags)
    assert "CUDA graphs" not in output
    accuracy = float(output.split("accuracy")[-1].split()[0])
    assert accuracy > 0.9


def test_a_run_twice_is_the_same_bits(tmp_path: Path) -> None:
    a, b = (train(1, tmp_path / name, SMALL, "--device", "gpu")[1] for name in "ab")
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)


@pytest.mark.parametrize("way", ["host", "ipc"])
def test_ranks_that_share_a_gpu_agree_with_one(way: str, tmp_path: Path) -> None:
    more = ["--device", "gpu", "--dtype", "float64", "--no-normalize", "--bucket-bytes", "100"]
    _, one = train(1, tmp_path / "one", SMALL, *more, "--batch-size", "12")
    output, two = train(2, tmp_path / "two", SMALL, *more, "--batch-size", "6", "--gpu-transport", way)
    assert f"GPU transport: {way}" in output and "share 1 GPU" in output
    assert_close(two, one, 1e-9)
    _, again = train(2, tmp_path / "again", SMALL, *more, "--batch-size", "6", "--gpu-transport", way)
    assert all(two[name].tobytes() == again[name].tobytes() for name in two)


def test_the_memory_of_a_run_is_reported(tmp_path: Path) -> None:
    train(1, tmp_path, SMALL, "--device", "gpu")
    assert "device_memory" in (tmp_path / "metrics.jsonl").read_text()
