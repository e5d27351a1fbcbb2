"""Whole runs on GPUs, which CuPy's stand-in simulates (see tests/simulated): what goes where, and the kernels' results.

Real GPUs are tests/gpu's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mpitrain.cuda

from ..conftest import JOBS, ROOT, Mpi, run
from ..unit.cuda.emulated import build
from .test_sync import assert_close, assert_same_bits, final

SMALL = JOBS / "small.py"
CNN = ROOT / "jobs" / "fashion_cnn.py"
KERNELS = Path(mpitrain.cuda.__file__).parent / "kernels"

Train = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("emulated"), sorted(KERNELS.glob("*.cu")))


@pytest.fixture
def simulated(library: Path) -> dict[str, str]:
    """The environment of ranks that see two GPUs."""
    path = f"{ROOT / 'tests' / 'simulated'}{os.pathsep}{ROOT}"
    return {"PYTHONPATH": path, "SIMULATED_GPUS": "2", "SIMULATED_CUDA_LIBRARY": str(library)}


def train(mpi: Mpi, n: int, run_dir: Path, *flags: str | Path, env: dict[str, str] | None = None):
    flags = ("--dtype", "float64", "--train-steps", "20", "--validate-steps", "10", *flags)
    done = mpi.train(n, flags[-1], *flags[:-1], "--run-dir", run_dir, env=env)
    return done.stdout, final(run_dir)


@pytest.mark.parametrize(
    ("n", "flags", "job"),
    [
        (2, ["--batch-size", "6"], SMALL),
        (1, ["--devices-per-rank", "2"], SMALL),
        (2, ["--batch-size", "6", "--accumulate-steps", "2", "--no-normalize"], SMALL),
        (2, ["--batch-size", "6", "--clip-norm", "0.5", "--histogram-steps", "10"], SMALL),
        (1, ["--optimizer", "lamb"], SMALL),
        (2, ["--batch-size", "6", "--mode", "local"], SMALL),
        (1, ["--batch-size", "5", "--mode", "async"], SMALL),
        (3, ["--batch-size", "6", "--mode", "backup", "--ps", "1", "--backup-workers", "0", "--no-normalize"], SMALL),
        (1, ["--batch-size", "5"], CNN),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_gpus_agree_with_processors(
    openmpi: Mpi, simulated: dict[str, str], n: int, flags: list[str], job: Path, tmp_path: Path
) -> None:
    said, there = train(openmpi, n, tmp_path / "gpu", *flags, "--device", "gpu", job, env=simulated)
    _, here = train(openmpi, n, tmp_path / "cpu", *flags, "--device", "cpu", job)
    assert "accuracy" in said
    assert_close(there, here, 1e-9)


@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 3e-2), ("bfloat16", 0.2), ("float16", 3e-2)])
def test_runs_of_lower_precision_come_close(
    openmpi: Mpi, simulated: dict[str, str], precision: str, tolerance: float, tmp_path: Path
) -> None:
    flags = ("--dtype", "float32", "--optimizer", "momentum", "--train-steps", "10", "--no-normalize")
    _, rounded = train(openmpi, 1, tmp_path / "low", *flags, "--precision", precision, SMALL, env=simulated)
    _, exact = train(openmpi, 1, tmp_path / "full", *flags, SMALL, env=simulated)
    assert_close(rounded, exact, tolerance)
    assert any(rounded[name].tobytes() != exact[name].tobytes() for name in exact), "nothing was rounded"


def test_a_run_twice_is_the_same_bits(openmpi: Mpi, simulated: dict[str, str], tmp_path: Path) -> None:
    a, b = (train(openmpi, 2, tmp_path / name, SMALL, env=simulated)[1] for name in "ab")
    assert_same_bits(a, b)


def test_a_run_goes_on_from_gpu_to_processor_and_back(openmpi: Mpi, simulated: dict[str, str], tmp_path: Path) -> None:
    _, whole = train(openmpi, 2, tmp_path / "whole", SMALL)
    for steps, env in (("7", simulated), ("13", None), ("20", simulated)):
        parts = train(openmpi, 2, tmp_path / "parts", "--train-steps", steps, SMALL, env=env)[1]
    assert_close(parts, whole, 1e-9)


def test_who_computes_where_is_told(openmpi: Mpi, simulated: dict[str, str], tmp_path: Path) -> None:
    said, _ = train(openmpi, 3, tmp_path, "--log-device-placement", "--batch-size", "4", SMALL, env=simulated)
    assert [f"gpu:{i}" in said for i in range(3)] == [True, True, False]
    assert "every worker's device" in said and "each node" not in said
    assert "3 workers on" in said and "share 2 GPUs" in said


def test_a_model_that_does_not_fit_is_told(openmpi: Mpi, simulated: dict[str, str], tmp_path: Path) -> None:
    words = ["-m", "mpitrain", "train", SMALL, "--run-dir", tmp_path, "--hidden-units", "2000"]
    done = openmpi.run(2, *words, env={**simulated, "SIMULATED_GPU_BYTES": "10000000"})
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("mpitrain: ")]
    assert "is out of memory" in lines[0] and "--batch-size" in lines[0] and "rank" in lines[0]
    assert "Traceback" not in done.stderr


def test_one_without_a_gpu_computes_on_its_processor(openmpi: Mpi, simulated: dict[str, str], tmp_path: Path) -> None:
    """The second rank is started with every GPU hidden."""
    words = ["-m", "mpitrain", "train", str(SMALL), "--run-dir", str(tmp_path), "--train-steps", "5"]
    both = [str(openmpi.python), *words]
    hidden = [":", "-n", "1", "env", "CUDA_VISIBLE_DEVICES=", *both]
    done = openmpi_mpmd(openmpi, [*both, *hidden], simulated)
    assert done.returncode == 0, done.stderr
    assert "no GPU for worker 1" in done.stdout
    strict = "--no-soft-placement"
    done = openmpi_mpmd(openmpi, [*both, strict, *hidden, strict], simulated)
    assert done.returncode == 2
    assert "1 of 2 workers have no GPU" in done.stderr


def openmpi_mpmd(mpi: Mpi, words: list[str], env: dict[str, str]):
    """One rank of the first program, and what follows each colon."""
    return run([*mpi.command(1), *words], env=env)
