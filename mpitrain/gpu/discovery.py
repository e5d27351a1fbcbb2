"""Which devices each worker computes on: the GPUs of its host, shared out fairly, or its processor."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..comm.cluster import Cluster
from ..core.device import CPU, Cpu, Device
from ..errors import ConfigError
from ..plan.config import RunConfig


class VisibleGpus(NamedTuple):
    """What a worker sees on its host.

    Attributes:
        node: Which node it is on.
        host: That node's name.
        gpus: Identifiers of the GPUs that it may use, by their number.
        why: Why there are none.
        is_broken: Whether CuPy is there, and cannot use any.
    """

    node: int
    host: str
    gpus: list[str]
    why: str
    is_broken: bool = False


@dataclass(frozen=True)
class GpuShare:
    """A GPU for a worker: its number there, and the part of its memory that the worker may take."""

    index: int
    fraction: float


class DeviceChoice(NamedTuple):
    """A rank's devices, and what the chief has to say of everybody's."""

    devices: list[Device]
    notes: list[str]


def choose_devices(cluster: Cluster, config: RunConfig) -> DeviceChoice:
    """The devices of this rank; collective over all ranks.

    Raises:
        ConfigError: On every rank: GPUs are asked for and are not there.
    """
    count = config.devices_per_rank
    cpus: list[Device] = [CPU] if count == 1 else [Cpu(index) for index in range(count)]
    if config.device == "cpu":
        return DeviceChoice([CPU] if cluster.is_server else cpus, [])
    mine = VisibleGpus(cluster.node_of[cluster.rank], cluster.host, *(([], "") if cluster.is_server else find_gpus()))
    everyone = cluster.comm.allgather(mine)
    workers = [everyone[rank] for rank in cluster.worker_ranks]
    try:
        check(workers, config)
    except ConfigError as error:
        error.on_all_ranks = True
        raise
    if cluster.is_server:
        return DeviceChoice([CPU], [])
    shares = assign_gpus(workers, count, config.gpu_memory_fraction)
    notes = describe(workers, shares)
    own = shares[cluster.task_index]
    if not own:
        return DeviceChoice(cpus, notes)
    from .device import Gpu

    gpus: list[Device] = [
        Gpu(share.index, share.fraction, config.gpu_memory_growth, config.precision, config.soft_placement)
        for share in own
    ]
    return DeviceChoice(gpus, notes)


def check(workers: Sequence[VisibleGpus], config: RunConfig) -> None:
    """Refuse where GPUs are asked for and are not there.

    Raises:
        ConfigError: No worker has one under ``--device gpu``, or not every worker has under ``--no-soft-placement``.
    """
    without = [index for index, worker in enumerate(workers) if not worker.gpus]
    if len(without) == len(workers) and config.precision != "float32":
        raise ConfigError(f"--precision {config.precision} is for GPUs, and no worker has one: leave it out")
    if len(without) == len(workers) and config.gpu_transport != "auto":
        raise ConfigError(f"--gpu-transport {config.gpu_transport} is for GPUs, and no worker has one: leave it out")
    if without and (config.precision == "float16" or config.gpu_transport != "auto"):
        first, by_precision = workers[without[0]], config.precision == "float16"
        option = "--precision float16" if by_precision else f"--gpu-transport {config.gpu_transport}"
        raise ConfigError(
            f"{option} needs a GPU for every worker, and worker {without[0]} on {first.host} has none ({first.why}): "
            f"{'give bfloat16' if by_precision else 'leave it out'}, or start fewer workers"
        )
    if not without or (config.device == "auto" and config.soft_placement):
        return
    asked = "--device gpu" if config.device == "gpu" else "--no-soft-placement"
    where = f"worker {without[0]} on {workers[without[0]].host}"
    why = workers[without[0]].why
    if len(without) == len(workers):
        raise ConfigError(
            f"{asked}: no worker has a GPU that CuPy can use ({where}: {why}); "
            f"{'give --device auto or cpu' if config.device == 'gpu' else 'leave it out'}, or see mpitrain doctor"
        )
    if not config.soft_placement:
        raise ConfigError(
            f"--no-soft-placement: {len(without)} of {len(workers)} workers have no GPU ({where}: {why}); "
            "leave it out to have them compute on their processors"
        )


def assign_gpus(workers: Sequence[VisibleGpus], count: int, fraction: float | None) -> list[list[GpuShare]]:
    """Give each worker ``count`` GPUs of those that it sees, the ones with the fewest takers first.

    GPUs are told apart by their identifiers, so it does not matter whether the scheduler shows all of a node's to every
    worker or each worker its own.

    Args:
        fraction: Of a GPU's memory for each worker on it; None for a fair share.

    Returns:
        For each worker its GPUs; none where it sees none.
    """
    takers: Counter[tuple[int, str]] = Counter()
    taken: list[list[int]] = []
    for worker in workers:
        taken.append([])
        for _ in range(count if worker.gpus else 0):
            index = min(range(len(worker.gpus)), key=lambda i: (takers[worker.node, worker.gpus[i]], i))
            takers[worker.node, worker.gpus[index]] += 1
            taken[-1].append(index)
    return [
        [GpuShare(i, fraction or own.count(i) / takers[worker.node, worker.gpus[i]]) for i in own]
        for worker, own in zip(workers, taken, strict=True)
    ]


def describe(workers: Sequence[VisibleGpus], shares: Sequence[Sequence[GpuShare]]) -> list[str]:
    """What users should know of who computes where."""
    notes = []
    without = [index for index, own in enumerate(shares) if not own]
    if len(without) == len(workers) and workers[0].is_broken:
        notes.append(f"no GPU: {workers[0].why}")
    if without and len(without) < len(workers):
        first = workers[without[0]]
        names = ", ".join(map(str, without[:8])) + (" ..." if len(without) > 8 else "")
        notes.append(
            f"no GPU for worker{'s' * (len(without) > 1)} {names} ({first.host}: {first.why}), "
            f"which compute{'s' * (len(without) == 1)} on the processor, in the precision of --dtype; so parameters "
            "stay in the hosts' memory for all"
        )
    for node in dict.fromkeys(worker.node for worker in workers):
        here = [(worker, own) for worker, own in zip(workers, shares, strict=True) if worker.node == node and own]
        used = {worker.gpus[share.index] for worker, own in here for share in own}
        if len(here) > len(used):
            notes.append(
                f"warning: {len(here)} workers on {here[0][0].host} share {len(used)} GPU{'s' * (len(used) != 1)}, "
                "and wait for each other there; one worker a GPU is faster"
            )
    return notes


def find_gpus() -> tuple[list[str], str, bool]:
    """What this process sees: the last three of ``VisibleGpus``; local."""
    if importlib.util.find_spec("cupy") is None:
        return [], "CuPy is not installed: pip install 'mpitrain[cuda13]', or cuda12 for an older driver", False
    try:
        from .device import identify

        return identify(), "", False
    except Exception as error:  # an installation can be broken in any way, and most runs need none
        told = str(error).strip() or type(error).__name__
        return [], f"CuPy is installed, and says: {told.splitlines()[0]}", True
