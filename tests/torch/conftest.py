"""Tests of PyTorch modules; they need the extra ``torch``."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..simulators.simulated_gpus import environment_of_gpus
from ..support.launch import STRICT, Mpi
from ..support.world.controller import World

# With MPITRAIN_TEST_STRICT, collecting these tests fails without torch.
collect_ignore_glob = [] if STRICT or importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Let torch use one thread in this process: threads would wait for each other while other tests use the cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def gpu_world(openmpi: Mpi, library: Path) -> Iterator[World]:
    """Two ranks of Open MPI with two simulated GPUs, where torch's modules compute in memory of these GPUs."""
    # Scripts of earlier tests keep their memory.
    env = {**environment_of_gpus(library), "SIMULATED_GPU_BYTES": str(16 << 30)}
    world = World(openmpi, env, size=2, modules=["tests.torch.on_simulated_gpu"])
    yield world
    world.close()


@pytest.fixture
def mpich_with_torch(mpich: Mpi, monkeypatch: pytest.MonkeyPatch) -> Mpi:
    """MPICH, whose environment has no torch, with the packages of this environment on PYTHONPATH.

    This environment's mpi4py works there, too: it loads the MPI library of the environment that runs it.
    """
    paths = [os.environ.get("PYTHONPATH"), sysconfig.get_path("purelib")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return mpich
