"""Choose each worker's devices: the GPUs of its host, shared fairly, or the CPU."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..comm.cluster import Cluster
from ..core.device import CPU, Cpu, Device
from ..core.words import counted, numbered
from ..errors import ConfigError
from ..plan.config import RunConfig


class VisibleGpus(NamedTuple):
    """The GPUs visible to a worker.

    Attributes:
        node: Index of the worker's node.
        host: Name of the node.
        gpus: Identifiers of the visible GPUs, by index.
        why: Reason why no GPU is visible.
        is_broken: Whether CuPy is installed but cannot use any GPU.
    """

    node: int
    host: str
    gpus: list[str]
    why: str
    is_broken: bool = False


@dataclass(frozen=True)
class GpuShare:
    """A worker's share of a GPU: its device index, and the fraction of its memory that the worker may use."""

    index: int
    fraction: float


class DeviceChoice(NamedTuple):
    """A rank's devices, and notes for the chief to print about all ranks."""

    devices: list[Device]
    notes: list[str]


def choose_devices(cluster: Cluster, config: RunConfig) -> DeviceChoice:
    """Choose the devices of this rank. Collective over all ranks.

    Raises:
        ConfigError: On every rank: GPUs are requested but not available.
    """
    options = config.device
    count = options.devices_per_rank
    cpus: list[Device] = [CPU] if count == 1 else [Cpu(index) for index in range(count)]
    if options.device == "cpu":
        return DeviceChoice([CPU] if cluster.is_server else cpus, [])
    local = VisibleGpus(cluster.node_of[cluster.rank], cluster.host, *(([], "") if cluster.is_server else find_gpus()))
    all_ranks = cluster.comm.allgather(local)
    workers = [all_ranks[rank] for rank in cluster.worker_ranks]
    try:
        check(workers, config)
    except ConfigError as error:
        error.on_all_ranks = True
        raise
    if cluster.is_server:
        return DeviceChoice([CPU], [])
    shares = assign_gpus(workers, count, options.gpu_memory_fraction)
    notes = describe(workers, shares)
    if not options.flush_denormals and any(shares):
        notes.append(
            "--no-flush-denormals has no effect on this package's GPU kernels, which CuPy compiles with -ftz=true"
        )
    own = shares[cluster.task_index]
    if not own:
        return DeviceChoice(cpus, notes)
    from .device import Gpu

    gpus: list[Device] = [
        Gpu(share.index, share.fraction, options.gpu_memory_growth, options.precision, options.soft_placement)
        for share in own
    ]
    return DeviceChoice(gpus, notes)


def check(workers: Sequence[VisibleGpus], config: RunConfig) -> None:
    """Check that requested GPUs are available.

    Raises:
        ConfigError: An option requires a GPU on at least one worker or on every worker, and such GPUs are missing.
    """
    options = config.device
    without = [index for index, worker in enumerate(workers) if not worker.gpus]
    if len(without) == len(workers) and options.precision not in ("float32", "bfloat16"):
        raise ConfigError(
            f"--precision {options.precision} requires GPUs, but no worker has one; use --precision float32"
        )
    if len(without) == len(workers) and options.gpu_transport != "auto":
        raise ConfigError(
            f"--gpu-transport {options.gpu_transport} requires GPUs, but no worker has one; remove --gpu-transport"
        )
    if without and (options.precision == "float16" or options.gpu_transport != "auto"):
        first, by_precision = workers[without[0]], options.precision == "float16"
        option = "--precision float16" if by_precision else f"--gpu-transport {options.gpu_transport}"
        raise ConfigError(
            f"{option} requires a GPU for every worker, but worker {without[0]} on {first.host} has none "
            f"({first.why}); {'use bfloat16' if by_precision else 'remove --gpu-transport'} or start fewer workers"
        )
    if not without or (options.device == "auto" and options.soft_placement):
        return
    option = "--device gpu" if options.device == "gpu" else "--no-soft-placement"
    where = f"worker {without[0]} on {workers[without[0]].host}"
    why = workers[without[0]].why
    if len(without) == len(workers):
        raise ConfigError(
            f"{option}: no worker has a GPU that CuPy can use ({where}: {why}); "
            f"{'use --device auto or cpu' if options.device == 'gpu' else f'remove {option}'}, or run mpitrain doctor"
        )
    if not options.soft_placement:
        raise ConfigError(
            f"--no-soft-placement: {len(without)} of {len(workers)} workers have no GPU ({where}: {why}); "
            "remove --no-soft-placement to use the CPU for these workers"
        )


def assign_gpus(workers: Sequence[VisibleGpus], count: int, fraction: float | None) -> list[list[GpuShare]]:
    """Assign to each worker that sees GPUs ``count`` shares of these, preferring GPUs with the fewest users.

    GPUs are compared by identifier. The scheduler may show all GPUs of a node to every worker, or only its own GPU to
    each worker.

    Args:
        fraction: Fraction of a GPU's memory for each worker on it; None for an equal share.

    Returns:
        The GPUs of each worker; an empty list if it sees none.
    """
    users: Counter[tuple[int, str]] = Counter()
    assigned: list[list[int]] = []
    for worker in workers:
        assigned.append([])
        for _ in range(count if worker.gpus else 0):
            index = min(range(len(worker.gpus)), key=lambda i: (users[worker.node, worker.gpus[i]], i))
            users[worker.node, worker.gpus[index]] += 1
            assigned[-1].append(index)
    return [
        [GpuShare(i, fraction or own.count(i) / users[worker.node, worker.gpus[i]]) for i in own]
        for worker, own in zip(workers, assigned, strict=True)
    ]


def describe(workers: Sequence[VisibleGpus], shares: Sequence[Sequence[GpuShare]]) -> list[str]:
    """Return notes to the user about the workers' devices."""
    notes = []
    without = [index for index, own in enumerate(shares) if not own]
    if len(without) == len(workers) and workers[0].is_broken:
        notes.append(f"no GPU: {workers[0].why}")
    if without and len(without) < len(workers):
        first = workers[without[0]]
        notes.append(
            f"no GPU for {numbered('worker', without)} ({first.host}: {first.why}), "
            f"which use{'s' * (len(without) == 1)} the CPU in the precision of --dtype; "
            "parameters of all workers stay in host memory"
        )
    for node in dict.fromkeys(worker.node for worker in workers):
        local = [(worker, own) for worker, own in zip(workers, shares, strict=True) if worker.node == node and own]
        used = {worker.gpus[share.index] for worker, own in local for share in own}
        if len(local) > len(used):
            notes.append(
                f"warning: {len(local)} workers on {local[0][0].host} share {counted(len(used), 'GPU')} "
                "and run one after the other; one worker per GPU is faster"
            )
    return notes


def find_gpus() -> tuple[list[str], str, bool]:
    """Return the GPUs visible to this process: the last three fields of ``VisibleGpus``. Local."""
    if importlib.util.find_spec("cupy") is None:
        return [], "CuPy is not installed: pip install 'mpitrain[cuda13]', or cuda12 for an older driver", False
    try:
        from .device import identify

        return identify(), "", False
    except Exception as error:  # a broken installation can raise anything, and most runs need no GPU
        reason = str(error).strip() or type(error).__name__
        return [], f"CuPy is installed but failed: {reason.splitlines()[0]}", True
