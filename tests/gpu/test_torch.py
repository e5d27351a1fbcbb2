"""PyTorch modules, training loops and ``torch.distributed`` on a GPU, compared with the CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("cupy") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("CuPy and torch are not both installed", allow_module_level=True)

import cupy

if not cupy.is_available():
    pytest.skip("no NVIDIA GPU", allow_module_level=True)

from ..support.launch import PROGRAMS, ROOT, one_line, run, with_checkout
from ..support.results import final
from .test_runs import launcher

MODELS = ROOT / "tests" / "torch" / "models.py"
LOOP = ROOT / "tests" / "torch" / "own_loop.py"

pytestmark = pytest.mark.gpu


def start(n: int, *words: str | Path) -> str:
    """Run ``python WORDS`` on ``n`` ranks, which must succeed; return its output."""
    command = [*(launcher(n) if n > 1 else []), sys.executable, *map(str, words)]
    done = run(command, timeout=200, env=with_checkout())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def result_of(output: str) -> dict[str, Any]:
    """Return the JSON that a program has printed; mpirun may print escape sequences after it."""
    return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])  # type: ignore[no-any-return]


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    compared = [name for name in expected if name.startswith(("params/", "buffers/"))]
    assert compared
    for name in compared:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-9, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("n", "flags"),
    [
        (1, ["--kind", "all", "--optimizer", "momentum"]),
        (2, ["--kind", "all", "--optimizer", "momentum", "--bucket-bytes", "100"]),
        (2, ["--accumulate-steps", "2", "--freeze", "--optimizer", "adamw"]),
        (1, ["--devices-per-rank", "2", "--kind", "all", "--optimizer", "momentum"]),
        (2, ["--mode", "local", "--kind", "lstm", "--optimizer", "momentum"]),
        (1, ["--mode", "async", "--kind", "gpt", "--optimizer", "adam"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_modules_agree_with_the_cpu(n: int, flags: list[str], tmp_path: Path) -> None:
    for device in ("cpu", "gpu"):
        words = ["--run-dir", tmp_path / device, "--threads", "1", "--device", device, "--dtype", "float64", *flags]
        start(n, "-m", "mpitrain", "train", MODELS, *words)
    assert_close(final(tmp_path / "gpu"), final(tmp_path / "cpu"))


@pytest.mark.parametrize("flags", [[], ["--accumulate-steps", "2", "--batch-size", "3"], ["--scheduler", "cosine"]])
def test_a_training_loop_agrees_with_the_cpu(flags: list[str], tmp_path: Path) -> None:
    for device in ("cpu", "gpu"):
        words = ["--device", device, "--run-dir", tmp_path / device, LOOP, "--tensors", *flags]
        start(2, "-m", "mpitrain", "train", *words)
    assert_close(final(tmp_path / "gpu"), final(tmp_path / "cpu"))


def test_operations_on_cuda_tensors() -> None:
    """The program compares each operation with results that each rank computes itself."""
    output = start(2, "-W", "ignore", PROGRAMS / "backend_collectives.py", "--device", "cuda")
    assert result_of(output)["checks"] > 500


def test_parallel_wrappers_on_cuda_tensors() -> None:
    """The program compares each way of training with the same training over gloo."""
    output = start(2, "-W", "ignore", PROGRAMS / "backend_training.py", "--device", "cuda")
    found = result_of(output)
    assert {"DDP", "FSDP2"} <= found.keys()
    assert {name: value for name, value in found.items() if value > (1e-2 if "fp16" in name else 1e-8)} == {}


def train(folder: Path, job: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    words = ["train", str(job), "--run-dir", str(folder), "--device", "gpu", "--train-steps", "20", *flags]
    return run([sys.executable, "-m", "mpitrain", *words], timeout=200, env=with_checkout())


def test_memory_of_a_module_is_limited(tmp_path: Path) -> None:
    share = (96 << 20) / cupy.cuda.runtime.memGetInfo()[1]
    flags = ["--model", "mlp1024", "--batch-size", "6000", "--gpu-memory-fraction", f"{share:.9f}"]
    done = train(tmp_path, ROOT / "bench" / "jobs" / "torch_models.py", *flags)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "gpu:0" in one_line(done.stderr) and "--batch-size" in done.stderr


def test_memory_is_allocated_as_needed(tmp_path: Path) -> None:
    done = train(tmp_path, MODELS, "--kind", "mlp", "--gpu-memory-fraction", "0.05", "--no-gpu-memory-growth")
    assert done.returncode == 0, done.stderr
    assert "--no-gpu-memory-growth" in done.stdout + done.stderr
