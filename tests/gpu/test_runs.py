"""Runs on a GPU, of one rank and, if mpirun is installed, of several ranks on the GPU, compared with CPU runs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("cupy") is None:
    pytest.skip("CuPy is not installed", allow_module_level=True)

import cupy

if not cupy.is_available():
    pytest.skip("no NVIDIA GPU", allow_module_level=True)

from mpitrain.gpu.device import identify

from ..support.launch import JOBS, LAUNCHER_ENVIRONMENT, ROOT, one_line, run, with_checkout
from ..support.results import assert_close, assert_same_bits, final

SMALL = JOBS / "small.py"
CNN = ROOT / "jobs" / "fashion_cnn.py"
MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
DOUBLE = ("--dtype", "float64", "--no-normalize")

pytestmark = pytest.mark.gpu


def launcher(n: int) -> list[str]:
    if MPIRUN is None:
        pytest.skip("no mpirun")
    return [MPIRUN, "-n", str(n), "--oversubscribe", "--bind-to", "none"]


def start(
    n: int, folder: Path, job: Path, *flags: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a job and return its exit status and output."""
    words = [sys.executable, "-m", "mpitrain", "train", str(job), "--run-dir", str(folder)]
    words += ["--train-steps", "20", "--validate-steps", "10", *flags]
    return run([*(launcher(n) if n > 1 else []), *words], timeout=300, env={**with_checkout(), **(env or {})})


def train(n: int, folder: Path, job: Path, *flags: str) -> tuple[str, dict[str, np.ndarray]]:
    """Run a job, which must succeed; return its output and the values of its last checkpoint."""
    done = start(n, folder, job, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr, final(folder)


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


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float16"])
@pytest.mark.parametrize("job", [SMALL, CNN], ids=lambda job: job.stem)
def test_a_run_twice_is_the_same_bits(job: Path, precision: str, tmp_path: Path) -> None:
    """This requires that cuDNN chooses the same execution plans in both runs."""
    flags = ("--device", "gpu", "--precision", precision)
    a, b = (train(1, tmp_path / name, job, *flags)[1] for name in "ab")
    assert_same_bits(a, b)


# Several ranks that share a GPU.

MODES = {
    "sync": ("float32", "tf32", "bfloat16", "float16"),
    **dict.fromkeys(("local", "async", "ssp", "backup"), ("float32", "tf32", "bfloat16")),
}


@pytest.mark.parametrize(
    ("mode", "precision"), [(mode, precision) for mode, precisions in MODES.items() for precision in precisions]
)
def test_every_mode_learns_in_every_precision(mode: str, precision: str, tmp_path: Path) -> None:
    flags = ["--device", "gpu", "--mode", mode, "--precision", precision, "--train-steps", "300"]
    output, _ = train(2, tmp_path, SMALL, *flags, "--no-normalize", "--validate-steps", "100")
    assert "CUDA graphs" not in output
    assert accuracy(tmp_path) > 0.9


def accuracy(run_dir: Path) -> float:
    """Return the last validation accuracy of a run."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["validation_accuracy"] for line in lines if "validation_accuracy" in line][-1]


@pytest.mark.parametrize("transport", ["host", "nccl", "cuda-aware"])
def test_every_transport_agrees_with_one_rank_or_is_refused(transport: str, tmp_path: Path) -> None:
    """NCCL needs a GPU for each rank, and cuda-aware an MPI library that accepts device memory."""
    more = ["--device", "gpu", *DOUBLE, "--bucket-bytes", "100"]
    shared = (*more, "--batch-size", "6", "--gpu-transport", transport)
    done = start(2, tmp_path / "two", SMALL, *shared)
    if transport in ("nccl", "cuda-aware") and done.returncode == 2:
        assert f"--gpu-transport {transport}" in one_line(done.stderr)
        return
    assert done.returncode == 0, done.stderr
    assert f"GPU transport: {transport}" in done.stdout + done.stderr
    two = final(tmp_path / "two")
    assert_close(two, train(1, tmp_path / "one", SMALL, *more, "--batch-size", "12")[1], 1e-9)
    assert_same_bits(train(2, tmp_path / "again", SMALL, *shared)[1], two)


def test_virtual_workers_have_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    flags = ("--device", "gpu", "--virtual-workers", "5", "--batch-size", "4", "--no-joint", "--gpu-transport", "host")
    alone = train(1, tmp_path / "1", SMALL, *flags)[1]
    for n in (2, 3):
        assert_same_bits(train(n, tmp_path / str(n), SMALL, *flags)[1], alone)


def test_ranks_may_name_their_gpus_differently(tmp_path: Path) -> None:
    """Each rank sees one GPU, as device 0. With a single GPU, one rank selects it by number, the other one by UUID."""
    count = cupy.cuda.runtime.getDeviceCount()
    names = ["0", "1" if count > 1 else f"GPU-{uuid.UUID(identify()[0])}"]
    flags = ["--device", "gpu", *DOUBLE, "--train-steps", "20", "--batch-size", "6"]
    words = [sys.executable, "-m", "mpitrain", "train", str(SMALL), "--run-dir", str(tmp_path / "two"), *flags]
    first, second = (["env", f"CUDA_VISIBLE_DEVICES={name}", *words] for name in names)
    done = run([*launcher(1), *first, ":", "-n", "1", *second], timeout=300, env=with_checkout())
    assert done.returncode == 0, done.stderr
    one = train(1, tmp_path / "one", SMALL, "--device", "gpu", *DOUBLE, "--batch-size", "12")[1]
    assert_close(final(tmp_path / "two"), one, 1e-9)


def test_a_run_continues_from_cpu_to_gpu_and_back(tmp_path: Path) -> None:
    whole = train(1, tmp_path / "whole", SMALL, "--device", "cpu", *DOUBLE)[1]
    for steps, device in (("7", "cpu"), ("13", "gpu"), ("20", "cpu")):
        parts = train(1, tmp_path / "parts", SMALL, "--train-steps", steps, "--device", device, *DOUBLE)[1]
    assert_close(parts, whole, 1e-9)


# Errors.


def test_full_gpu_memory_is_one_line(tmp_path: Path) -> None:
    share = (64 << 20) / cupy.cuda.runtime.memGetInfo()[1]
    done = start(1, tmp_path, SMALL, "--gpu-memory-fraction", f"{share:.9f}", "--hidden-units", "4000")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "gpu:0" in one_line(done.stderr) and "--batch-size" in done.stderr


def test_without_cudnn_convolutions_are_matrix_products(tmp_path: Path) -> None:
    (tmp_path / "cudnn.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), with_checkout()["PYTHONPATH"]])}
    done = start(1, tmp_path / "run", CNN, "--device", "gpu", "--log-device-placement", env=path)
    assert done.returncode == 0, done.stderr
    assert "matrix products" in done.stdout and "libcudnn.so.9" in done.stdout


def test_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    """Afterwards another run can use the GPU."""
    flags = ["--device", "gpu", "--train-steps", "100000000", "--log-steps", "10", "--log-secs", "0"]
    words = [*launcher(2), sys.executable, "-m", "mpitrain", "train", str(SMALL), "--run-dir", str(tmp_path / "run")]
    environment = {**os.environ, **LAUNCHER_ENVIRONMENT, **with_checkout()}
    with subprocess.Popen([*words, *flags], env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        while not running.stdout.readline().startswith("step "):
            assert running.poll() is None
            time.sleep(0.01)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        running.stdout.read()
        assert running.wait(timeout=60) != 0
    train(1, tmp_path / "after", SMALL, "--device", "gpu")


def test_the_memory_of_a_run_is_reported(tmp_path: Path) -> None:
    train(1, tmp_path, SMALL, "--device", "gpu")
    assert "device_memory" in (tmp_path / "metrics.jsonl").read_text()
