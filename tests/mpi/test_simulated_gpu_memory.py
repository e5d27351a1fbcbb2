"""Memory of simulated GPUs, its content, and preparations before training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain import data
from mpitrain.gpu import sources

from ..support.launch import ROOT, Mpi, one_line, run
from ..support.results import assert_close, assert_same_bits, final
from ..support.world import calls
from ..support.world.controller import World
from .test_simulated_gpus import SMALL, train


def test_a_model_that_does_not_fit_is_reported(
    openmpi: Mpi, simulated: dict[str, str], driver: str, tmp_path: Path
) -> None:
    words = ["-m", "mpitrain", "train", SMALL, "--run-dir", tmp_path, "--hidden-units", "2000"]
    env = {**simulated, "SIMULATED_GPU_BYTES": "10000000", "LD_LIBRARY_PATH": driver, "CUDA_VISIBLE_DEVICES": "1"}
    done = openmpi.run(2, *words, env=env)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("mpitrain: ")]
    assert "gpu:0" in lines[0] and "--batch-size" in lines[0] and "rank" in lines[0]
    assert "python3 (pid 4194305, 59.0 GiB)" in lines[0], "who else is on the second GPU, which is the first here"
    assert "Traceback" not in done.stderr


def trained_with(fraction: float | None, words: list[str], place: calls.Place) -> subprocess.CompletedProcess[str]:
    """Train on this rank, where the training data may take a fraction of the memory that is left."""
    with pytest.MonkeyPatch.context() as patch:
        if fraction is not None:
            patch.setattr("mpitrain.gpu.device._DATA_FRACTION", fraction)
        return calls.train(words, place)


@pytest.mark.parametrize(
    "flags",
    [[], ["--accumulate-steps", "2"], ["--devices-per-rank", "2"], ["--devices-per-rank", "2", "--mode", "async"]],
    ids=" ".join,
)
def test_training_data_is_on_the_gpu_if_it_fits(
    gpu_world: World, order: dict[str, str], flags: list[str], tmp_path: Path
) -> None:
    trained, held = {}, {}
    for name, fraction in (("fits", None), ("does not fit", 0.0)):
        given = ["--dtype", "float64", "--train-steps", "20", "--validate-steps", "10", *flags]
        words = [str(SMALL), *given, "--run-dir", str(tmp_path / name)]
        (done,) = gpu_world.call(1, trained_with, fraction, words, calls.Place(str(ROOT), order))
        assert done.returncode == 0, done.stdout + done.stderr
        output, trained[name] = done.stdout + done.stderr, final(tmp_path / name)
        assert "page-locked" not in output, "each array is page-locked once"
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        held[name] = next(line["device_memory"]["data"] for line in lines if "device_memory" in line)
    assert_same_bits(trained["fits"], trained["does not fit"])
    assert held == {"fits": data.mnist(None).train.nbytes, "does not fit": 0}


def test_training_data_leaves_the_memory_that_the_model_needs(
    openmpi: Mpi, simulated: dict[str, str], tmp_path: Path
) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import numpy as np\n"
        "from mpitrain import Job, data, nn, optim\n\n\n"
        "def job():\n"
        "    x, y = np.ones((4000, 1000), np.float32), np.zeros(4000, int)\n"
        "    layers = nn.Dense(1000, 500), *[nn.GELU() for _ in range(62)], nn.Dense(500, 3)\n"
        "    train = data.from_arrays(x, y, classes=3)\n"
        "    loss, optimizer = nn.SoftmaxCrossEntropy(), optim.momentum(0.01)\n"
        "    return Job(nn.Sequential(*layers), loss, optimizer, train, batch_size=500, train_steps=4)\n"
    )
    words = ["train", job, "--run-dir", tmp_path / "run", "--validate-steps", "0"]
    done = openmpi.run(1, "-m", "mpitrain", *words, env={**simulated, "SIMULATED_GPU_BYTES": str(112 << 20)})
    assert done.returncode == 0, done.stderr


def test_grids_are_as_large_as_cuda_reports(simulated: dict[str, str]) -> None:
    program = (
        "from mpitrain.gpu.nvrtc import CupyKernels\n"
        "from mpitrain.gpu.ops import Kernel\n"
        "print(CupyKernels().resident_blocks(Kernel('optim', 'update_segments_sgd', 'float')))"
    )
    done = run([sys.executable, "-c", program], env=simulated)
    assert done.stdout.split() == ["100"], done.stderr  # 20 multiprocessors, 5 blocks on each


def test_kernels_are_compiled_on_one_rank_of_a_node(openmpi: Mpi, simulated: dict[str, str], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    flags = "--train-steps", "1", "--dtype", "float32"
    train(openmpi, 3, tmp_path, *flags, SMALL, env={**simulated, "SIMULATED_CUPY_CACHE": str(cache)})
    compiled = [path.name.split("-") for path in cache.iterdir()]
    assert len(compiled) == len(sources.variants(["float32"])) and len({pid for _, pid in compiled}) == 1


def test_a_failed_compilation_is_one_line(openmpi: Mpi, simulated: dict[str, str], tmp_path: Path) -> None:
    # The format of NVRTC's error messages.
    message = 'cast.cu(7): error: identifier "half" is undefined'
    log = f'{message}\n  half value;\n  ^\n\n1 error detected in the compilation of "cast.cu".\n'
    env = {**simulated, "SIMULATED_COMPILER_LOG": log}
    done = openmpi.run(2, "-m", "mpitrain", "train", SMALL, "--run-dir", tmp_path / "run", env=env)
    assert done.returncode == 1
    assert message in one_line(done.stderr)


def test_all_free_memory_is_reserved_without_growth(openmpi: Mpi, simulated: dict[str, str], tmp_path: Path) -> None:
    env = {**simulated, "SIMULATED_GPU_BYTES_USED": str(400 << 20)}  # of 1 GiB
    train(openmpi, 1, tmp_path, "--no-gpu-memory-growth", "--train-steps", "1", SMALL, env=env)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (held,) = [line["device_memory"]["held"] for line in lines if "device_memory" in line]
    assert 0.95 * (624 << 20) < held <= 624 << 20


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_memory_that_cannot_be_pinned_is_reported_once(
    openmpi: Mpi, world: World, simulated: dict[str, str], mode: str, tmp_path: Path
) -> None:
    flags = ("--gpu-transport", "host") if mode == "sync" else ("--mode", mode)
    env = {**simulated, "SIMULATED_NO_PINNING": "1"}
    output, there = train(openmpi, 2 if mode == "sync" else 1, tmp_path / "gpu", *flags, SMALL, env=env)
    assert output.count("operation not supported") == 1
    _, here = train(world, 2 if mode == "sync" else 1, tmp_path / "cpu", "--mode", mode, SMALL)
    assert_close(there, here, 1e-9)
