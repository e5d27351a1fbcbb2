"""Ranks that see two GPUs, which a simulator of CuPy provides; see ``simulated``."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

import mpitrain

from .emulation.kernels import build
from .launch import ROOT, run

KERNELS = Path(mpitrain.__file__).parent / "gpu" / "kernels"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("emulated"), sorted(KERNELS.glob("*.cu")))


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for LD_LIBRARY_PATH with a driver's library that tells of two GPUs."""
    folder = tmp_path_factory.mktemp("driver")
    source = ROOT / "tests" / "support" / "simulated" / "driver" / "nvml.c"
    done = run(["g++", "-x", "c", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(source)])
    assert done.returncode == 0, done.stderr
    return str(folder)


@pytest.fixture
def simulated(library: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of ranks that see two GPUs, which do what they are asked in another order for each test."""
    path = f"{ROOT / 'tests' / 'support' / 'simulated'}{os.pathsep}{ROOT}"
    order = zlib.crc32(request.node.name.encode())
    return {
        "PYTHONPATH": path,
        "SIMULATED_GPUS": "2",
        "SIMULATED_CUDA_LIBRARY": str(library),
        "SIMULATED_ORDER": str(order),
    }
