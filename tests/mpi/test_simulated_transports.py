"""Sums of gradients over simulated GPUs; see ``test_simulated_gpus``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint.container import write_container

from ..support.launch import Mpi, one_line
from ..support.results import assert_close
from .test_simulated_gpus import SMALL, SUMMED, train


@pytest.fixture(scope="module")
def by_processors(openmpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return train(openmpi, 3, tmp_path_factory.mktemp("processors"), *SUMMED, SMALL)[1]


@pytest.mark.parametrize(
    ("way", "more"),
    [
        ("host", []),
        ("host", ["--no-shared-memory"]),
        ("nccl", []),
        ("cuda-aware", []),
        ("host", ["--accumulate-steps", "2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_gradients_are_summed_in_any_way(
    openmpi: Mpi,
    simulated: dict[str, str],
    by_processors: dict[str, np.ndarray],
    way: str,
    more: list[str],
    tmp_path: Path,
) -> None:
    env = {**simulated, "SIMULATED_GPUS": "3", "SIMULATED_NCCL": "1", "MPICH_GPU_SUPPORT_ENABLED": "1"}
    output, there = train(openmpi, 3, tmp_path, *SUMMED, *more, "--gpu-transport", way, SMALL, env=env)
    assert f"GPU transport: {way}" in output
    assert_close(there, by_processors, 1e-9)


def test_the_fastest_way_is_taken_and_reported(openmpi: Mpi, simulated: dict[str, str], tmp_path: Path) -> None:
    output, _ = train(openmpi, 2, tmp_path, "--train-steps", "2", SMALL, env={**simulated, "SIMULATED_NCCL": "1"})
    (line,) = [line for line in output.splitlines() if line.startswith("GPU transport: ")]
    words = line.replace(":", " ").replace("(", " ").replace(",", " ").split()
    times = {way: float(words[words.index(way) + 1]) for way in ("host", "nccl")}
    assert times[line.split()[2]] == min(times.values())  # rounded times may be equal
    assert "cuda-aware" not in line, "this MPI library does not say that it can"


def test_a_resumed_run_takes_the_way_of_before(openmpi: Mpi, simulated: dict[str, str], tmp_path: Path) -> None:
    """The original transport may add in another order than the fastest transport."""
    with_nccl = {**simulated, "SIMULATED_NCCL": "1"}
    train(openmpi, 2, tmp_path, "--train-steps", "2", "--gpu-transport", "nccl", SMALL, env=with_nccl)
    output, _ = train(openmpi, 2, tmp_path, "--train-steps", "4", SMALL, env=with_nccl)
    assert "GPU transport: nccl, " in output
    output, _ = train(openmpi, 2, tmp_path, "--train-steps", "6", SMALL, env=simulated)
    assert "GPU transport: host (" in output, "NCCL is not there any more"


def test_a_run_with_a_transport_of_version_0_1_measures_again(
    openmpi: Mpi, simulated: dict[str, str], tmp_path: Path
) -> None:
    """Version 0.1 had a transport ``ipc``."""
    train(openmpi, 2, tmp_path, "--train-steps", "2", SMALL, env=simulated)
    path = checkpoint.path_for(tmp_path / "checkpoints", 2)
    with checkpoint.Checkpoint(path) as opened:
        arrays = {name: opened.read(name) for name in opened.datasets}
        attributes = {name: dict(values) for name, values in opened.attributes.items()}
    attributes["run/state/gpu_transport"]["name"] = "ipc"
    write_container(path, arrays, attributes)
    output, _ = train(openmpi, 2, tmp_path, "--train-steps", "4", SMALL, env={**simulated, "SIMULATED_NCCL": "1"})
    (line,) = [line for line in output.splitlines() if line.startswith("GPU transport: ")]
    assert f"resumed from {path}" in output and " ms per sum (" in line


@pytest.mark.parametrize(("way", "why"), [("nccl", "nvidia-nccl"), ("cuda-aware", "CUDA")])
def test_a_way_that_is_not_there_is_reported(
    openmpi: Mpi, simulated: dict[str, str], way: str, why: str, tmp_path: Path
) -> None:
    words = ["-m", "mpitrain", "train", SMALL, "--run-dir", tmp_path, "--gpu-transport", way]
    done = openmpi.run(2, *words, env=simulated)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("mpitrain: ")]
    assert len(lines) == 1 and why in lines[0] and f"--gpu-transport {way}" in lines[0]


def test_nccl_wants_a_gpu_for_each_worker(openmpi: Mpi, simulated: dict[str, str], tmp_path: Path) -> None:
    env = {**simulated, "SIMULATED_NCCL": "1", "SIMULATED_GPUS": "1"}
    words = ["-m", "mpitrain", "train", SMALL, "--run-dir", tmp_path, "--gpu-transport", "nccl"]
    done = openmpi.run(2, *words, env=env)
    assert done.returncode == 2 and "--gpu-transport nccl" in one_line(done.stderr)


@pytest.mark.parametrize("more", [[], ["--accumulate-steps", "3"], ["--accumulate-steps", "5"]], ids=" ".join)
def test_several_gpus_of_each_rank_are_one(
    openmpi: Mpi, simulated: dict[str, str], by_processors: dict[str, np.ndarray], more: list[str], tmp_path: Path
) -> None:
    flags = ("--batch-size", "15", "--no-normalize", "--devices-per-rank", "3", *more)
    _, there = train(openmpi, 1, tmp_path, *flags, SMALL, env={**simulated, "SIMULATED_GPUS": "3"})
    assert_close(there, by_processors, 1e-9)
