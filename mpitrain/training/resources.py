"""The threads and devices that a rank may use."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Sequence

from threadpoolctl import threadpool_info, threadpool_limits

from ..comm.cluster import Cluster
from ..core.device import Device
from ..errors import ConfigError
from ..nn.layer import Layer
from ..plan.config import RunConfig
from ..plan.job import Job

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


def limit_threads(cluster: Cluster, requested: int | None, devices: int) -> int:
    """Set and return the number of BLAS threads: as requested, from the environment, or this rank's share of cores.

    The devices of a rank compute at the same time and share its threads.
    """
    from_environment = [int(os.environ[name]) for name in _THREAD_VARIABLES if os.environ.get(name, "").isdigit()]
    threads = max(1, (requested or (from_environment[0] if from_environment else cluster.threads)) // devices)
    threadpool_limits(threads)
    return threads


def restart_blas_threads() -> None:
    """End OpenBLAS's threads; the next product starts new ones, which inherit this thread's flush mode.

    No other thread may be computing with BLAS.
    """
    for library in threadpool_info():
        if library["internal_api"] == "openblas":
            with contextlib.suppress(OSError, AttributeError):  # this build of the library does not export the function
                ctypes.CDLL(library["filepath"]).blas_thread_shutdown_()


def limit_threads_of_torch(threads: int) -> None:
    """Set the number of torch's threads, if torch was imported."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def check_devices(cluster: Cluster, config: RunConfig, job: Job, devices: Sequence[Device]) -> None:
    """Check that the model supports the precision on some worker's device. Collective over all ranks.

    Raises:
        ConfigError: The precision is not supported; on every rank.
    """
    precision, layers = config.device.precision, isinstance(job.model, Layer)
    on_gpus = cluster.any(devices[0].is_gpu)
    if precision == "float32" or (on_gpus if layers else precision == "bfloat16"):
        return
    raise ConfigError(
        f"--precision {precision} requires GPUs for models of mpitrain.nn, but no worker has any; use float32"
        if layers
        else f"--precision {precision} is not available for PyTorch modules; use --precision bfloat16",
        on_all_ranks=True,
    )
