"""The parameters in modes with servers, as one rank sees them: local and remote shards and the step coordinator.

A node with servers holds the training vectors in memory shared by its ranks; a server's shard is its ranges of them.
The step coordinator lies on the first server's node. Without servers, one node's shared memory holds everything.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...comm.backoff import Backoff
from ...comm.cluster import Cluster
from ...comm.mpi import MPI
from ...comm.rpc import Routes, RpcClient, RpcServer, open_rpc
from ...comm.shared_memory import SharedArrays, sharing_problem
from ...comm.vector_codec import make_vector_codec
from ...core.layout import Array, row_stride
from ...core.training_state import TrainingState
from ...errors import ConfigError
from ...plan.placement import ranges_of
from ...plan.plan import Plan
from ...plan.progress import Progress
from .coordinator import STATS_WORDS, CoordinatorMemory, CoordinatorRules, LocalCoordinator, StepCoordinator
from .remote import PrefetchingShard, RemoteCoordinator, RemoteShard, ServerCalls
from .shard import LocalShard, Shard, ShardClient

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Nodes:
    """Which ranks share memory.

    Attributes:
        comm: The ranks that share memory with this rank.
        of: A node number for each rank; ranks with the same number share memory.
    """

    comm: MPI.Intracomm
    of: list[int]

    def same(self, a: int, b: int) -> bool:
        return self.of[a] == self.of[b]


class Store:
    """Shards, step coordinator and RPC transport of this rank. Construction is collective over all ranks.

    Attributes:
        nodes: Which ranks share memory.
        holders: The rank that holds each shard: its server, or without servers the first rank of the node.
        shards: The shards on this node, by number.
        coordinator: The step coordinator's memory if it is on this node, else None.
        vectors: This node's vectors, by name, if it holds shards.
        rows: In modes that drop late gradients: the gradients of this node's ranks, shape (ranks, size or more), if
            it holds shards.
        on_one_node: In these modes: whether all workers and shards share one node; workers then update by themselves.
        rpc, rpc_server: On workers and on servers: how they communicate between nodes; None if all share memory.
        reads, reads_server: The same for parameters that are prefetched; None if they are not.
        waiting: How this rank waits.
        frozen: ``TrainingState.frozen`` as the shards of this node apply it; shared by the node.
        rates: The optimizer's ``live_rates`` as the shards of this node apply them; shared by the node.
        initial_vectors: ``vectors`` on the rank that fills them; None on all others.

    Raises:
        ConfigError: On every rank: there are several nodes and no server.
    """

    def __init__(self, cluster: Cluster, plan: Plan, state: TrainingState) -> None:
        self.plan, self.cluster = plan, cluster
        self.nodes = _nodes(cluster, plan)
        self.holders = cluster.servers or [0]
        self._check_servers()
        self._shared = SharedArrays(self.nodes.comm)
        local_workers = sum(self.nodes.same(w, cluster.rank) for w in cluster.worker_ranks)
        self.waiting = Backoff(oversubscribed=local_workers > cluster.cores)
        every, mode = [*cluster.worker_ranks, *self.holders], plan.config.mode
        self.on_one_node = mode.drops_late_gradients and all(self.nodes.same(rank, every[0]) for rank in every)
        self.ranges = [ranges_of(plan.placements, s, plan.layout) for s in range(plan.n_servers)]
        self.vectors: dict[str, Array] = {}
        self.shards: dict[int, Shard] = {}
        self.rows: Array | None = None
        self.partials: Array | None = None
        self.frozen = self._shared.allocate(state.frozen.shape, np.uint8)
        self.frozen[:] = state.frozen
        live_rates = plan.optimizer.live_rates
        self.rates = self._shared.allocate((len(live_rates),), np.float64)
        self.rates[:] = [live.as_set() for live in live_rates]
        for index, live in enumerate(live_rates):
            live.bind(self.rates, index)
        self._allocate()
        self.initial_vectors = self.vectors if self.shards and self.nodes.comm.rank == 0 else None
        self._routes = self._make_routes()
        one_sided = plan.config.servers.one_sided
        self.rpc: RpcClient | None = None
        self.rpc_server: RpcServer | None = None
        self.reads: RpcClient | None = None
        self.reads_server: RpcServer | None = None
        if self._routes is not None:
            self.rpc, self.rpc_server = open_rpc(self._routes, one_sided)
        if self._routes is None and plan.config.servers.prefetch_params:
            _log.info("--prefetch-params has no effect: all workers share memory with all servers")
        elif self._routes is not None and plan.config.servers.prefetch_params:
            self._reads_comm = cluster.comm.Dup()
            reads = replace(self._routes, comm=self._reads_comm, codec=None, replies_only=True)
            self.reads, self.reads_server = open_rpc(reads, one_sided)
        if self._routes is not None:
            self.waiting.progress = cluster.comm.Iprobe

    def start(self, progress: Progress) -> None:
        """Begin to train from ``initial_vectors``, which have been filled. Collective over all ranks."""
        if self.initial_vectors is not None:
            for shard in self.shards.values():
                shard.open(progress.step)
            if self.coordinator is not None:
                self.coordinator.open(progress.step, self.plan.train_steps, self.plan.next_pause(progress.step))
        self.cluster.comm.Barrier()

    def step_coordinator(self, shards: Sequence[ShardClient]) -> StepCoordinator:
        """Return the step coordinator for this worker, whose proxies are ``shards``."""
        if self.coordinator is not None:
            return LocalCoordinator(self.coordinator, self.cluster.task_index, self.waiting)
        first = shards[0]
        assert self.rpc is not None and isinstance(first, RemoteShard)
        return RemoteCoordinator(ServerCalls(self.rpc, self.holders[0]), first)

    def senders(self) -> Iterator[tuple[int, int, int]]:
        """Yield ranges that this worker sends to servers on other nodes, each with the number of workers that do so."""
        nodes, workers = self.nodes, self.cluster.worker_ranks
        for ranges, holder in zip(self.ranges, self.holders, strict=True):
            if not nodes.same(self.cluster.rank, holder):
                n_senders = sum(not nodes.same(worker, holder) for worker in workers)
                yield from ((lo, hi, n_senders) for lo, hi in ranges)

    def gradient_nbytes(self) -> list[list[int]]:
        """Return the numbers of bytes in which a worker submits a gradient to a shard, by worker and shard."""
        in_memory = [sum(hi - lo for lo, hi in ranges) * self.plan.dtype.itemsize for ranges in self.ranges]
        sent = in_memory if self._routes is None else [self._routes.request_nbytes(rank) for rank in self.holders]
        pairs = list(zip(self.holders, in_memory, sent, strict=True))
        return [
            [memory if self.nodes.same(worker, holder) else message for holder, memory, message in pairs]
            for worker in self.cluster.worker_ranks
        ]

    def shard_clients(self, params: Array) -> list[ShardClient]:
        """Return all shards for this worker, whose parameters are ``params``; by number."""
        row, names = self.nodes.comm.rank, self.plan.vectors
        clients: list[ShardClient] = []
        for s, holder in enumerate(self.holders):
            if s in self.shards:
                clients.append(LocalShard(self.shards[s], params, row, self.waiting))
                continue
            assert self.rpc is not None
            proxy = ServerCalls(self.rpc, holder), self.ranges[s], names, self.frozen
            if self.reads is None:
                clients.append(RemoteShard(*proxy))
            else:
                clients.append(PrefetchingShard(*proxy, ServerCalls(self.reads, holder), params))
        return clients

    def free(self) -> None:
        """Free memory. Collective over all ranks, which wait for each other without using a core."""
        barrier = self.cluster.comm.Ibarrier()
        self.waiting.until(lambda spins: barrier.Test())
        for end in (self.rpc, self.rpc_server, self.reads, self.reads_server):
            if end is not None:
                end.free()
        if self.reads or self.reads_server:
            self._reads_comm.Free()
        self._shared.free()

    def _check_servers(self) -> None:
        if self.cluster.servers or len(set(self.nodes.of)) == 1:
            return
        error = ConfigError(
            f"--mode {self.plan.config.parallel.mode} without servers requires all ranks to share memory, but these "
            f"ranks form {len(set(self.nodes.of))} groups that share none (several hosts, or --no-shared-memory); "
            "pass --ps 1 or more"
        )
        error.on_all_ranks = True
        raise error

    def _allocate(self) -> None:
        plan, shared, rank = self.plan, self._shared, self.cluster.rank
        local = [s for s, holder in enumerate(self.holders) if self.nodes.same(holder, rank)]
        size, stride = plan.layout.size, row_stride(plan.layout.size)
        if local:
            self.vectors = {name: shared.allocate((stride,), plan.dtype)[:size] for name in plan.vectors}
            updater = plan.updater(self.vectors, self.frozen)
            for s in local:
                self.shards[s] = Shard(shared, self.ranges[s], updater, self.vectors, self.frozen, self.waiting)
            if plan.config.mode.drops_late_gradients:
                self.rows = shared.allocate((self.nodes.comm.size, stride), plan.dtype)
                self.partials = shared.allocate((self.nodes.comm.size, updater.n_sums), np.float64)
        self.coordinator: CoordinatorMemory | None = None
        if self.nodes.same(self.holders[0], rank):
            self.coordinator = CoordinatorMemory(shared, self._rules())

    def _rules(self) -> CoordinatorRules:
        mode, workers = self.plan.config.mode, self.plan.workers
        if mode.drops_late_gradients:
            return CoordinatorRules(
                workers, gradients_per_step=self.plan.gradients_per_step, on_one_node=self.on_one_node
            )
        if mode.bounds_staleness:
            return CoordinatorRules(workers, bound=self.plan.config.parallel.max_staleness)
        return CoordinatorRules(workers)

    def _make_routes(self) -> Routes | None:
        """Return the routes between workers and servers on other nodes; None if there are none. Collective."""
        cluster, nodes = self.cluster, self.nodes
        clients = {holder: [w for w in cluster.worker_ranks if not nodes.same(w, holder)] for holder in self.holders}
        if not any(clients.values()):
            if self.plan.config.compression is not None:
                _log.info("--compress has no effect: all workers share memory with all servers")
            return None
        plan = self.plan
        codec = None
        if plan.config.compression is not None:
            counts = {hi - lo for ranges in self.ranges for lo, hi in ranges}
            codec = make_vector_codec(plan.config.compression, plan.dtype, plan.layout, cluster.comm, counts)
        return Routes(
            comm=cluster.comm,
            clients=clients,
            ranges=dict(zip(self.holders, self.ranges, strict=True)),
            size=plan.layout.size,
            dtype=plan.dtype,
            n_extra=plan.workers * STATS_WORDS,
            codec=codec,
        )


def _nodes(cluster: Cluster, plan: Plan) -> Nodes:
    """Return the nodes; each rank is its own node if memory cannot or must not be shared."""
    if plan.config.parallel.shared_memory:
        vectors = len(plan.vectors) + (cluster.node.size if plan.config.mode.drops_late_gradients else 0)
        nbytes = vectors * plan.nbytes
        problem = next(filter(None, cluster.comm.allgather(sharing_problem(cluster.node, nbytes))), "")
        if not problem:
            return Nodes(cluster.node, cluster.node_of)
        _log.info("ranks of a node cannot share memory and use messages instead: %s", problem)
    return Nodes(cluster.self_comm, list(range(cluster.size)))
