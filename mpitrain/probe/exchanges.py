"""Exchanges between nodes as the strategies make them: sums of gradients, and requests to a server.

Sums begin while the gradient is computed, as in training: their cost is the additional time of the gradient. This
additional time is longer than the time of a sum alone, because processors do other work between the parts of the sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ..comm.backoff import Backoff
from ..comm.cluster import Cluster
from ..comm.hierarchy import Hierarchy, hierarchy_of
from ..comm.internode import DividedSums, NodeSums
from ..comm.mpi import MPI
from ..comm.powersgd import PowerSums, compresses_any
from ..comm.rpc import Routes, RpcClient, RpcServer, open_rpc
from ..comm.sum_order import sum_order
from ..core.layout import Array, row_stride
from ..plan.compression import CODECS, parse_compression
from ..plan.plan import Plan
from ..predict.measurements import ExchangeTimes
from .turns import await_all

LOW_RANK = parse_compression(CODECS["powersgd"].measured).rank  # of the ``powersgd`` compression that is measured
_SECONDS = 2.0  # duration of each measurement
_FEWEST, _MOST = 3, 60
_PING, _PUSH, _PULL, _END = range(4)


Gradient = Callable[[Callable[[int], None]], Array]


def measure_exchanges(cluster: Cluster, plan: Plan, gradient: Gradient) -> ExchangeTimes | None:
    """Return the times of exchanges between all nodes; None if there is one node. Collective over all ranks.

    Args:
        gradient: Returns a gradient, shape (layout.size,); it calls its argument as backward calls ``Strategy.ready``.
    """
    if cluster.n_nodes == 1:
        return None
    hierarchy = hierarchy_of(cluster, (cluster.node.size + 1) * plan.nbytes, plan.config.parallel.shared_memory)
    size = plan.layout.size
    rows = hierarchy.shared.allocate((hierarchy.node.size, row_stride(size)), plan.dtype)[:, :size]
    grads, params = rows[hierarchy.node.rank], hierarchy.shared.allocate((size,), plan.dtype)
    order = sum_order(hierarchy, leaves=None)
    sums: NodeSums = DividedSums(hierarchy, plan.buckets, rows, order, params)
    sum_s = _median_exchange(hierarchy, sums, plan, grads, gradient)
    low_rank_s = 0.0
    if compresses_any(plan.layout, LOW_RANK):
        sums = PowerSums(hierarchy, plan.buckets, plan.layout, grads, LOW_RANK, plan.config.training.seed)
        low_rank_s = _median_exchange(hierarchy, sums, plan, grads, gradient)
    hierarchy.free()
    per_node = 2 * (hierarchy.n_nodes - 1) / hierarchy.n_nodes * plan.nbytes
    return ExchangeTimes(sum_s / per_node, low_rank_s, *_measure_requests(cluster, plan))


def _median_exchange(hierarchy: Hierarchy, sums: NodeSums, plan: Plan, grads: Array, gradient: Gradient) -> float:
    """Return the seconds by which sums over nodes delay a gradient, and free ``sums``. Collective over all ranks."""
    buckets = plan.buckets

    def compute() -> None:
        np.copyto(grads, gradient(lambda start: None))

    def compute_and_exchange() -> None:
        started = 0

        def ready(start: int) -> None:
            nonlocal started
            while started < len(buckets) and buckets[started].lo >= start:
                sums.start(started)
                started += 1
            sums.progress()

        gradient(ready)
        ready(0)
        for index in range(len(buckets)):
            sums.finish(index)
            sums.share(index)
        sums.complete_all()

    alone, both = _repeat(hierarchy.comm, compute, compute_and_exchange)
    sums.free()
    return max(0.0, both - alone)


def _repeat(comm: MPI.Intracomm, *actions: Callable[[], object]) -> list[float]:
    """Return the median time of each collective action on the slowest rank; the actions run in turns. Collective."""
    times: list[list[float]] = []
    count = _FEWEST
    while len(times) < count + 1:
        times.append([_slowest(comm, action) for action in actions])
        if len(times) == 2:  # the first repetition may have compiled kernels
            count = int(np.clip(_SECONDS / sum(times[1]), _FEWEST, _MOST))
    return np.median(times[1:], axis=0).tolist()  # type: ignore[no-any-return]


def _slowest(comm: MPI.Intracomm, action: Callable[[], object]) -> float:
    """Return the seconds of an action on the slowest rank. Collective over ``comm``."""
    comm.Barrier()
    began = time.perf_counter()
    action()
    return comm.allreduce(time.perf_counter() - began, op=MPI.MAX)


def _measure_requests(cluster: Cluster, plan: Plan) -> tuple[float, float, float]:
    """Return the seconds of an empty request, and per pushed and per pulled byte. Collective over all ranks.

    The first rank serves, and the first rank of the next node sends requests.
    """
    client = next(rank for rank, node in enumerate(cluster.node_of) if node != cluster.node_of[0])
    routes = Routes(cluster.comm, {0: [client]}, {0: [(0, plan.layout.size)]}, plan.layout.size, plan.dtype, 0)
    rpc, server = open_rpc(routes, plan.config.servers.one_sided)
    times = (0.0, 0.0, 0.0)
    vector = np.zeros(plan.layout.size, plan.dtype)
    if server is not None:
        _serve(server, vector)
    elif rpc is not None and cluster.rank == client:
        times = _send_requests(rpc, vector)
    await_all(cluster.comm)
    for end in (rpc, server):
        if end is not None:
            end.free()
    empty, push, pull = cluster.comm.bcast(times, root=client)
    return empty, max(0.0, push - empty) / plan.nbytes, max(0.0, pull - empty) / plan.nbytes


def _serve(rpc: RpcServer, params: Array) -> None:
    """Answer requests as a server does, until the last one."""
    waiting, idle = Backoff(oversubscribed=True), 1
    while True:
        for client, kind, _ in rpc.requests():
            idle = 1
            rpc.send_reply(client, vector=params if kind == _PULL else None)
            if kind == _END:
                return
        if not rpc.is_receiving():
            waiting.pause(idle)
        idle += 1


def _send_requests(rpc: RpcClient, grads: Array) -> tuple[float, float, float]:
    medians = []
    for kind in (_PING, _PUSH, _PULL):
        times: list[float] = []
        until = time.perf_counter() + _SECONDS
        while len(times) < _FEWEST or (time.perf_counter() < until and len(times) < 4 * _MOST):
            began = time.perf_counter()
            rpc.send_request(0, kind, vector=grads if kind == _PUSH else None)
            rpc.wait_reply(0)
            times.append(time.perf_counter() - began)
        medians.append(float(np.median(times)))
    rpc.send_request(0, _END)
    rpc.wait_reply(0)
    return medians[0], medians[1], medians[2]
