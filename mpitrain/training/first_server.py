"""The first server of a launch: what is imported and prepared once for all ranks on the host of ``mpitrain run``."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any, NoReturn, cast

import numba
from threadpoolctl import ThreadpoolController, threadpool_info

from ..core import kernel_cache
from ..process.fork_server import initial_environment, serve_first
from ..process.launcher_env import import_alike


def serve(run: Callable[[list[str]], object]) -> NoReturn:
    """Fork ranks, which run the ``mpitrain`` command, ``run``, with the arguments that their client passes."""
    kernel_cache.prepare()
    gc.freeze()
    started_with, numba_config = initial_environment(), cast("Any", numba.config)
    kernels = next((lib["architecture"] for lib in threadpool_info() if lib["internal_api"] == "openblas"), "")

    def start(arguments: list[str]) -> object:
        cores = len(os.sched_getaffinity(0))  # those of the rank; libraries have counted those of the server
        libraries = ThreadpoolController()  # with those of torch
        if any(library["num_threads"] > cores for library in libraries.info()):
            libraries.limit(limits=cores)
        numba_config.NUMBA_NUM_THREADS = min(numba_config.NUMBA_NUM_THREADS, cores)
        return run(arguments)

    serve_first(lambda environment: import_alike(started_with, environment, kernels), start)
