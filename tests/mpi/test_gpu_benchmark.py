"""Every part of ``bench/gpu.py`` runs, on simulated GPUs; the PyTorch program runs on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.launch import ROOT, Mpi, run

SIMULATED = ROOT / "tests" / "simulators" / "gpu"


def measure(env: dict[str, str], cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark in folder ``cwd``; PYTHONPATH has only the simulated libraries, not mpitrain."""
    program = [sys.executable, str(ROOT / "bench" / "gpu.py"), *words, "--small", "--rounds", "1"]
    return run(program, env={**env, "PYTHONPATH": str(SIMULATED)}, cwd=cwd)


def test_every_measurement_is_printed_also_if_the_peer_fails(
    openmpi: Mpi, simulated: dict[str, str], tmp_path: Path
) -> None:
    done = measure(simulated, tmp_path, "mnist_mlp", "update", "sums", "--torch", "/bin/false")
    assert done.returncode == 1
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [words[0] for words in lines if "failed:" in words] == ["eager", "compile", "reduce-overhead", "graph"]
    first = [words[0] for words in lines if words and any(unit in words for unit in ("steps/s", "GB/s"))]
    assert first[:6] == ["mpitrain", "copy", "sgd", "momentum", "adam", "adam,"]
    assert sum(re.search(r" \d+\.\d\d$", line) is not None for line in done.stdout.splitlines()) == 4, "sums"


def test_convolutions_and_memory(openmpi: Mpi, simulated: dict[str, str], tmp_path: Path) -> None:
    done = measure(simulated, tmp_path, "fashion_cnn", "memory", "--precision", "tf32", "--torch", "")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cuDNN" in done.stdout and done.stdout.count("steps/s") == 1 and done.stdout.count("cuBLAS 32") == 1


def test_tests_for_a_gpu_extend_pythonpath(simulated: dict[str, str]) -> None:
    """In this test PYTHONPATH has the simulator, on a compute node the installed wheels."""
    words = [sys.executable, "-m", "pytest", "-q", "tests/gpu/test_convolutions.py", "-k", "bfloat16"]
    done = run(words, env={**simulated, "PYTHONPATH": str(SIMULATED)}, cwd=ROOT)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_every_kernel_is_timed(simulated: dict[str, str], tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "bench" / "gpu_checks" / "kernels.py"), "bfloat16", "--small"]
    done = run(words, env={**simulated, "PYTHONPATH": str(SIMULATED)}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sum("GB/s" in line for line in done.stdout.splitlines()) == 29


@pytest.mark.parametrize("words", [["gpu.py"], ["gpu_checks/accuracy.py", "gpu", "data", "file"]], ids=" ".join)
def test_a_missing_gpu_is_a_one_line_error(simulated: dict[str, str], words: list[str], tmp_path: Path) -> None:
    env = {**simulated, "PYTHONPATH": str(SIMULATED), "CUDA_VISIBLE_DEVICES": ""}
    done = run([sys.executable, str(ROOT / "bench" / words[0]), *words[1:]], env=env, cwd=tmp_path)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and not done.stdout


def test_the_peer_runs_without_a_gpu() -> None:
    words = [sys.executable, str(ROOT / "bench" / "peers" / "torch_gpu.py"), "mlp", "16", "20", "float32", "eager"]
    done = run([*words, "--device", "cpu"], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert len([rate for rate in json.loads(done.stdout)["steps_per_s"] if rate > 0]) == 9
