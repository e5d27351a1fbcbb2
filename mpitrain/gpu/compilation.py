"""Compilation of the GPU kernels before training, on one worker per node and GPU architecture."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from ..comm.cluster import Cluster
from ..core.cpus import own_cores
from ..core.device import Device
from . import sources

_log = logging.getLogger(__name__)
_QUIET_S = 1.0  # loading all kernels from the cache takes less time than this; only compilation is reported


def compile_kernels(cluster: Cluster, devices: Sequence[Device], dtype: np.dtype[Any]) -> None:
    """Compile the kernels on one worker per node and GPU architecture; other workers load them from CuPy's cache.

    Collective over the workers.

    Args:
        dtype: Type of the parameters. Kernels are compiled for this type and for the type of the activations.
    """
    gpu: Any = devices[0] if devices[0].is_gpu else None
    node = cluster.training.node
    architectures = node.allgather(None if gpu is None else gpu.architecture)
    with cluster.training.agree("compiling the GPU kernels"):
        if gpu is not None and architectures.index(gpu.architecture) == node.rank:
            _compile(gpu, sources.variants({dtype.name, (gpu.compute_dtype or dtype).name}))


def _compile(gpu: Any, variants: list[tuple[str, str]]) -> None:
    """Compile ``sources.variants`` for a GPU in parallel threads; report this if CuPy's cache does not have them."""
    began = time.perf_counter()

    def compile_source(name: str, stored: str) -> None:
        with gpu.activate():
            gpu.compile(name, stored)

    with ThreadPoolExecutor(len(own_cores())) as threads:
        compiling = [threads.submit(compile_source, *variant) for variant in variants]
        if wait(compiling, timeout=_QUIET_S).not_done:
            _log.info("compiling the GPU kernels for this machine; this takes up to a minute, once")
        for future in compiling:
            future.result()
    if (seconds := time.perf_counter() - began) > _QUIET_S:
        _log.info("compiled the GPU kernels in %.1f s", seconds)
