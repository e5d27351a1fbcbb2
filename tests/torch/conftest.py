"""Tests of PyTorch modules; they need the extra ``torch``."""

from __future__ import annotations

import importlib.util
import os
import sysconfig

import pytest

from ..support.launch import STRICT, Mpi

# Without torch, these tests are not collected. If no test may be skipped, collecting them fails.
collect_ignore_glob = [] if STRICT or importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Let torch use one thread in this process: threads would wait for each other while other tests use the cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def mpich_with_torch(mpich: Mpi, monkeypatch: pytest.MonkeyPatch) -> Mpi:
    """MPICH's environment, which finds torch among the packages of this environment.

    mpi4py is the same in both environments: it loads the MPI library of the environment that runs it.
    """
    paths = [os.environ.get("PYTHONPATH"), sysconfig.get_path("purelib")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return mpich
