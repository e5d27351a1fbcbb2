"""Select a worker's strategy by ``--mode``."""

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
    cluster: Cluster, plan: Plan, devices: Sequence[Device], initial_state: InitialState, say: Callable[[str], None]
) -> Strategy:
    """Return the strategy for ``sync`` or ``local``. Collective over the workers.

    Args:
        devices: The devices of this worker.
        initial_state: Sets the initial values of vectors.
    """
    if plan.config.mode == "local":
        return Local(_hierarchy(cluster, plan, say, 2 + cluster.training.node.size), plan, initial_state)
    if trains_on_gpus(cluster, plan, devices):
        by_host = plan.config.gpu_transport in ("auto", "host")
        vectors = len(plan.vectors) + (cluster.training.node.size + 1 if by_host else 0)
        return SyncGpu(_hierarchy(cluster, plan, say, vectors), plan, devices[0], initial_state, say)
    return Sync(_hierarchy(cluster, plan, say, cluster.training.node.size + len(plan.vectors)), plan, initial_state)


def trains_on_gpus(cluster: Cluster, plan: Plan, devices: Sequence[Device]) -> bool:
    """Return whether vectors live on every worker's device. Collective over the workers, or over the servers."""
    mine = plan.config.mode == "sync" and devices[0].is_gpu
    return cluster.workers.allreduce(mine, op=MPI.LAND)


def ps_strategy(store: Store, devices: Sequence[Device] = (CPU,)) -> Strategy:
    """Return the strategy for ``async``, ``ssp`` or ``backup``. Local.

    Args:
        devices: The devices of this worker.
    """
    if store.plan.config.mode != "backup":
        return Async(store, early=devices[0].is_gpu)
    return BackupOnOneNode(store) if store.on_one_node else BackupWithServers(store)


def _hierarchy(cluster: Cluster, plan: Plan, say: Callable[[str], None], vectors: int) -> Hierarchy:
    nbytes = vectors * plan.nbytes
    return hierarchy_of(cluster, nbytes, plan.config.shared_memory, say)
