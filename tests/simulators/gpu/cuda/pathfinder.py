"""Simulates cuda-pathfinder, which finds CUDA's runtime library unless SIMULATED_NO_CUDART is set."""

from __future__ import annotations

import os
from types import SimpleNamespace

loaded: set[str] = set()


class DynamicLibNotFoundError(RuntimeError):
    pass


def load_nvidia_dynamic_lib(libname: str) -> SimpleNamespace:
    if "SIMULATED_NO_CUDART" in os.environ:
        raise DynamicLibNotFoundError(f'Failure finding "lib{libname}.so"')
    path = f"/simulated/lib{libname}.so.13"
    loaded.add(path)
    return SimpleNamespace(abs_path=path)
