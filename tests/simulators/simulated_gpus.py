"""Ranks that see two GPUs, which a simulator of CuPy provides; see ``simulated``."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import zlib
from pathlib import Path

import pytest

from mpitrain.gpu import sources

from ..support.launch import ROOT, run
from .emulation.kernels import KERNELS as KERNELS, build, write_sources

EMULATION = Path(__file__).parent / "emulation"


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config) -> Path:
    """Path of a library with the kernels for the CPU, compiled once for all processes when sources have changed."""
    folder = pytestconfig.cache.mkdir("emulated")
    used = sorted(path for path in EMULATION.iterdir() if path.is_file())
    texts = repr([(types, sources.text(name)) for name, types in sources.TYPES.items()])
    digest = hashlib.sha256(texts.encode() + b"".join(path.read_bytes() for path in used)).hexdigest()
    built = folder / f"{digest}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            for path in folder.glob("*.so"):
                path.unlink()
            with tempfile.TemporaryDirectory(dir=folder) as objects:
                build(Path(objects), write_sources(Path(objects))).rename(built)
    return built


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for LD_LIBRARY_PATH with a driver library that reports two GPUs."""
    folder = tmp_path_factory.mktemp("driver")
    source = ROOT / "tests" / "simulators" / "gpu" / "driver" / "nvml.c"
    done = run(["g++", "-x", "c", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(source)])
    assert done.returncode == 0, done.stderr
    return str(folder)


def environment_of_gpus(library: Path) -> dict[str, str]:
    """Return the environment of ranks with two simulated GPUs."""
    path = f"{ROOT / 'tests' / 'simulators' / 'gpu'}{os.pathsep}{ROOT}"
    return {"PYTHONPATH": path, "SIMULATED_GPUS": "2", "SIMULATED_CUDA_LIBRARY": str(library)}


@pytest.fixture
def order(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment in which the streams of simulated GPUs run in a different order for each test."""
    return {"SIMULATED_ORDER": str(zlib.crc32(request.node.name.encode()))}


@pytest.fixture
def simulated(library: Path, order: dict[str, str]) -> dict[str, str]:
    """The environment of ranks with two simulated GPUs."""
    return {**environment_of_gpus(library), **order}
