"""The versions of the software that a run's results may depend on, except MPI."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from threadpoolctl import threadpool_info

from ..core.h5 import h5py
from ..gpu import nvml

# Packages that a run imports or may import, and NVIDIA's libraries that it may load.
_PACKAGES = """
    mpitrain mpi4py numpy numba llvmlite h5py click cloudpickle docstring-parser rich threadpoolctl tomli-w tensorboardX
    torch
    cupy-cuda12x cupy-cuda13x nvidia-cublas nvidia-cublas-cu12 nvidia-cudnn-cu12 nvidia-cudnn-cu13
    nvidia-cudnn-frontend nvidia-nccl-cu12 nvidia-nccl-cu13
""".split()


def versions() -> dict[str, str]:
    """Return versions by name: of Python, the system, installed ``_PACKAGES``, and libraries other than MPI."""
    packages = {name: version for name in _PACKAGES if (version := _installed(name))}
    blas = {
        f"{lib['user_api']}_{lib['internal_api']}": f"{lib['version']} {lib.get('architecture', '')}".strip()
        for lib in threadpool_info()
    }
    system = {"python": platform.python_version(), "system": platform.platform()}
    return {**system, **packages, "hdf5": h5py.version.hdf5_version, **blas, **_gpus()}


def _gpus() -> dict[str, str]:
    """Return this host's GPUs and driver version, if it has any."""
    cards = nvml.list_gpus()
    return {"nvidia_driver": cards[0].driver, "gpus": ", ".join(card.name for card in cards)} if cards else {}


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
