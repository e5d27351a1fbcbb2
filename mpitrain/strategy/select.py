"""The strategy of a worker, by ``--mode``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..comm.cluster import Cluster
from ..comm.hierarchy import Hierarchy, hierarchy_of
from ..comm.mpi import MPI
from ..core.device import CPU, Device
from ..plan.plan import Plan
from ..plan.progress import InitialState
from .base import Strategy
from .local import Local
from .ps.asynchronous import Async
from .ps.backup import BackupOnOneNode, BackupWithServers
from .ps.store import Store
from .sync import Sync
from .sync_gpu import SyncGpu


def bulk_synchronous_strategy(
    cluster: Cluster, plan: Plan, devices: Sequence[Device], fill: InitialState, say: Callable[[str], None]
) -> Strategy:
    """``sync`` or ``local``; collective over the workers.

    Args:
        devices: Of this worker.
    """
    if plan.config.mode == "local":
        return Local(_hierarchy(cluster, plan, say, 2 + cluster.training.node.size), plan, fill)
    if trains_on_gpus(cluster, plan, devices):
        by_host = plan.config.gpu_transport in ("auto", "host")
        vectors = len(plan.vectors) + (cluster.training.node.size + 1 if by_host else 0)
        return SyncGpu(_hierarchy(cluster, plan, say, vectors), plan, devices[0], fill, say)
    return Sync(_hierarchy(cluster, plan, say, cluster.training.node.size + len(plan.vectors)), plan, fill)


def trains_on_gpus(cluster: Cluster, plan: Plan, devices: Sequence[Device]) -> bool:
    """Whether training's vectors live on every worker's device; collective over the workers, or the servers."""
    mine = plan.config.mode == "sync" and devices[0].is_gpu
    return cluster.workers.allreduce(mine, op=MPI.LAND)


def ps_strategy(store: Store, devices: Sequence[Device] = (CPU,)) -> Strategy:
    """``async``, ``ssp`` or ``backup``; local.

    Args:
        devices: Of this worker.
    """
    if store.plan.config.mode != "backup":
        return Async(store, early=devices[0].is_gpu)
    return BackupOnOneNode(store) if store.on_one_node else BackupWithServers(store)


def _hierarchy(cluster: Cluster, plan: Plan, say: Callable[[str], None], vectors: int) -> Hierarchy:
    nbytes = vectors * plan.nbytes
    return hierarchy_of(cluster, nbytes, plan.config.shared_memory, say)
