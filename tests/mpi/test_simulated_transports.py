"""Sums of gradients over simulated GPUs; see ``test_simulated_gpus``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint.container import write_container

from ..simulators.simulated_gpus import environment_of_gpus
from ..support.launch import Mpi
from ..support.results import assert_close, assert_same_bits
from ..support.world.controller import World
from .test_simulated_gpus import SMALL, SUMMED, train
from .test_virtual_workers import train as train_virtual


@pytest.fixture(scope="module")
def nccl_world(openmpi: Mpi, library: Path) -> Iterator[World]:
    """Three ranks of Open MPI with NCCL and three simulated GPUs."""
    world = World(openmpi, {**environment_of_gpus(library), "SIMULATED_GPUS": "3", "SIMULATED_NCCL": "1"}, size=3)
    yield world
    world.close()


@pytest.fixture(scope="module")
def by_processors(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return train(world, 3, tmp_path_factory.mktemp("processors"), *SUMMED, SMALL)[1]


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
    nccl_world: World,
    order: dict[str, str],
    by_processors: dict[str, np.ndarray],
    way: str,
    more: list[str],
    tmp_path: Path,
) -> None:
    env = {**order, "MPICH_GPU_SUPPORT_ENABLED": "1"}
    output, there = train(nccl_world, 3, tmp_path, *SUMMED, *more, "--gpu-transport", way, SMALL, env=env)
    assert f"GPU transport: {way}" in output
    assert_close(there, by_processors, 1e-9)


def test_the_fastest_way_is_taken_and_reported(nccl_world: World, order: dict[str, str], tmp_path: Path) -> None:
    output, _ = train(nccl_world, 2, tmp_path, "--train-steps", "2", SMALL, env=order)
    (line,) = [line for line in output.splitlines() if line.startswith("GPU transport: ")]
    words = line.replace(":", " ").replace("(", " ").replace(",", " ").split()
    times = {way: float(words[words.index(way) + 1]) for way in ("host", "nccl")}
    assert times[line.split()[2]] == min(times.values())  # rounded times may be equal
    assert "cuda-aware" not in line, "this MPI library does not say that it can"


def test_a_resumed_run_takes_the_way_of_before(
    gpu_world: World, nccl_world: World, order: dict[str, str], tmp_path: Path
) -> None:
    """The original transport may add in another order than the fastest transport."""
    train(nccl_world, 2, tmp_path, "--train-steps", "2", "--gpu-transport", "nccl", SMALL, env=order)
    output, _ = train(nccl_world, 2, tmp_path, "--train-steps", "4", SMALL, env=order)
    assert "GPU transport: nccl, " in output
    output, _ = train(gpu_world, 2, tmp_path, "--train-steps", "6", SMALL, env=order)
    assert "GPU transport: host (" in output, "NCCL is not there any more"


def test_a_run_with_a_transport_of_version_0_1_measures_again(
    gpu_world: World, nccl_world: World, order: dict[str, str], tmp_path: Path
) -> None:
    """Version 0.1 had a transport ``ipc``."""
    train(gpu_world, 2, tmp_path, "--train-steps", "2", SMALL, env=order)
    path = checkpoint.path_for(tmp_path / "checkpoints", 2)
    with checkpoint.Checkpoint(path) as opened:
        arrays = {name: opened.read(name) for name in opened.datasets}
        attributes = {name: dict(values) for name, values in opened.attributes.items()}
    attributes["run/state/gpu_transport"]["name"] = "ipc"
    write_container(path, arrays, attributes)
    output, _ = train(nccl_world, 2, tmp_path, "--train-steps", "4", SMALL, env=order)
    (line,) = [line for line in output.splitlines() if line.startswith("GPU transport: ")]
    assert f"resumed from {path}" in output and " ms per sum (" in line


@pytest.mark.parametrize(("way", "why"), [("nccl", "nvidia-nccl"), ("cuda-aware", "CUDA")])
def test_a_way_that_is_not_there_is_reported(gpu_world: World, way: str, why: str, tmp_path: Path) -> None:
    line = gpu_world.refusal(2, SMALL, "--run-dir", tmp_path, "--gpu-transport", way)
    assert why in line and f"--gpu-transport {way}" in line


def test_nccl_wants_a_gpu_for_each_worker(nccl_world: World, tmp_path: Path) -> None:
    words = [SMALL, "--run-dir", tmp_path, "--gpu-transport", "nccl"]
    assert "--gpu-transport nccl" in nccl_world.refusal(2, *words, env={"SIMULATED_GPUS": "1"})


@pytest.mark.parametrize(
    ("way", "more"),
    [
        ("host", []),
        ("host", ["--no-shared-memory", "--accumulate-steps", "2"]),
        ("nccl", ["--virtual-workers", "7", "--bucket-bytes", "0"]),
        ("nccl", ["--dtype", "float64", "--clip-norm", "0.2", "--log-grad-norm"]),
        ("cuda-aware", []),
        ("auto", ["--mode", "local", "--local-steps", "5"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_virtual_workers_have_the_same_bits_on_any_number_of_gpus(
    nccl_world: World, order: dict[str, str], way: str, more: list[str], tmp_path: Path
) -> None:
    flags, env = ("--device", "gpu", "--gpu-transport", way, *more), {**order, "MPICH_GPU_SUPPORT_ENABLED": "1"}
    alone = train_virtual(nccl_world, 1, tmp_path / "1", *flags, env=env)
    for n in (2, 3):
        assert_same_bits(train_virtual(nccl_world, n, tmp_path / str(n), *flags, env=env), alone)


@pytest.mark.parametrize("more", [[], ["--accumulate-steps", "3"], ["--accumulate-steps", "5"]], ids=" ".join)
def test_several_gpus_of_each_rank_are_one(
    gpu_world: World, order: dict[str, str], by_processors: dict[str, np.ndarray], more: list[str], tmp_path: Path
) -> None:
    flags = ("--batch-size", "15", "--no-normalize", "--devices-per-rank", "3", *more)
    _, there = train(gpu_world, 1, tmp_path, *flags, SMALL, env={**order, "SIMULATED_GPUS": "3"})
    assert_close(there, by_processors, 1e-9)
