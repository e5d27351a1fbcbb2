"""One rank's access to the parameters in modes with servers: local and remote shards, and the step coordinator.

A node with servers holds the training vectors in memory shared by its ranks; a server's shard consists of ranges of
them. The step coordinator lies on the first server's node. Without servers, one node's shared memory holds everything.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

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
from ..base import SharedVectors
from .coordinator import STATS_WORDS, CoordinatorMemory
from .remote import PrefetchingShard, RemoteCoordinator, RemoteShard, ServerCalls, ShardClient
from .shard import LocalShard, Shard

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


@dataclass
class NodeMemory:
    """The memory that the ranks of this node share.

    Attributes:
        frozen: ``TrainingState.frozen`` as the shards of this node apply it.
        rates: The optimizer's ``live_rates`` as the shards of this node apply them.
        vectors: The training vectors by name; empty if the node holds no shards.
        shards: The shards on this node, by number.
        coordinator: The step coordinator; None if it is on another node.
    """

    frozen: Array
    rates: Array
    vectors: dict[str, Array] = field(default_factory=dict)
    shards: dict[int, Shard] = field(default_factory=dict)
    coordinator: CoordinatorMemory | None = None


@dataclass(frozen=True)
class Channel:
    """This rank's end of an RPC transport between nodes: a client, a server, or neither."""

    client: RpcClient | None = None
    server: RpcServer | None = None

    def free(self) -> None:
        """Free memory. Collective over all ranks."""
        for end in (self.client, self.server):
            if end is not None:
                end.free()


class ParameterStore(ABC):
    """Shards, step coordinator and RPC transport of this rank; each mode has a subclass.

    Construction is collective over all ranks.

    Attributes:
        plan, cluster: As given.
        nodes: Which ranks share memory.
        memory: The memory that the ranks of this node share.
        requests: Requests of workers to servers on other nodes.
        reads: Another channel for parameters that are prefetched.
        waiting: The backoff of this rank's waits.
        initial_vectors: The node's vectors on the rank that fills them; None on all others.
        shared_vectors: The node's vectors on all its ranks; None if no shard is there.

    Raises:
        ConfigError: On every rank: there are several nodes and no server.
    """

    shares_gradients = False  # whether all ranks of a node have their gradients in shared memory

    def __init__(self, cluster: Cluster, plan: Plan, state: TrainingState) -> None:
        self.plan, self.cluster = plan, cluster
        self.nodes = _nodes(cluster, plan, self.shares_gradients)
        self._holders = cluster.servers or [0]  # the rank that holds each shard; without servers the node's first rank
        self._check_servers()
        self._shared = SharedArrays(self.nodes.comm)
        local_workers = sum(self.nodes.same(w, cluster.rank) for w in cluster.worker_ranks)
        self.waiting = Backoff(oversubscribed=local_workers > cluster.cores)
        self._ranges = [ranges_of(plan.placements, s, plan.layout) for s in range(plan.n_servers)]
        self.memory = NodeMemory(
            frozen=self._shared.allocate(state.frozen.shape, np.uint8),
            rates=self._shared.allocate((len(plan.optimizer.live_rates),), np.float64),
        )
        self.memory.frozen[:] = state.frozen
        self.memory.rates[:] = [live.as_set() for live in plan.optimizer.live_rates]
        for index, live in enumerate(plan.optimizer.live_rates):
            live.bind(self.memory.rates, index)
        self._allocate_shards()
        if self.nodes.same(self._holders[0], cluster.rank):
            self.memory.coordinator = self._allocate_coordinator(self._shared)
        fills = self.memory.shards and self.nodes.comm.rank == 0
        self.initial_vectors = self.memory.vectors if fills else None
        self.shared_vectors = SharedVectors(self.nodes.comm, self.memory.vectors) if self.memory.shards else None
        self._routes = self._make_routes()
        self.requests, self.reads = Channel(), Channel()
        self._reads_comm: MPI.Intracomm | None = None
        self._open_channels()

    @abstractmethod
    def _allocate_coordinator(self, shared: SharedArrays) -> CoordinatorMemory:
        """Return the step coordinator of the mode. Collective over the node."""

    def start(self, progress: Progress) -> None:
        """Begin to train from ``initial_vectors``, which have been filled. Collective over all ranks."""
        if self.initial_vectors is not None:
            for shard in self.memory.shards.values():
                shard.open(progress.step)
            if self.memory.coordinator is not None:
                self.memory.coordinator.open(progress.step, self.plan.train_steps, self.plan.next_pause(progress.step))
        self.cluster.comm.Barrier()

    def free(self) -> None:
        """Free memory. Collective over all ranks, which wait for each other without using a core."""
        barrier = self.cluster.comm.Ibarrier()
        self.waiting.until(lambda spins: barrier.Test())
        self.requests.free()
        self.reads.free()
        if self._reads_comm is not None:
            self._reads_comm.Free()
        self._shared.free()

    # For workers.

    def allocate_params(self) -> Array:
        """Return memory for this worker's parameters: the memory of the transport if all parameters arrive there."""
        size, client = self.plan.layout.size, self.requests.client
        if client is not None and len(client.vector) == size and self.reads.client is None:
            return client.vector
        return np.zeros(size, self.plan.dtype)

    def shard_clients(self, params: Array) -> list[ShardClient]:
        """Return all shards, by number, for this worker, whose parameters are ``params``."""
        memory, clients = self.memory, list[ShardClient]()
        for s, holder in enumerate(self._holders):
            if s in memory.shards:
                clients.append(LocalShard(memory.shards[s], params, self.waiting))
                continue
            proxy = self._calls(self.requests, holder), self._ranges[s], self.plan.vectors, memory.frozen
            if self.reads.client is None:
                clients.append(RemoteShard(*proxy))
            else:
                clients.append(PrefetchingShard(*proxy, self._calls(self.reads, holder), params))
        return clients

    def step_coordinator(self, shards: Sequence[ShardClient]) -> CoordinatorMemory | RemoteCoordinator:
        """Return the step coordinator for this worker; ``shards`` are the worker's clients of all shards."""
        if self.memory.coordinator is not None:
            return self.memory.coordinator
        assert isinstance(shards[0], RemoteShard)
        return RemoteCoordinator(self._calls(self.requests, self._holders[0]), shards[0])

    @property
    def residual(self) -> Array:
        """The gradient parts that compression has not sent, shape (size,); shape (0,) without compression."""
        return np.zeros(0) if self.requests.client is None else self.requests.client.residual

    def senders(self) -> Iterator[tuple[int, int, int]]:
        """Yield (lo, hi, n) for each range that n workers, including this worker, send to a server on another node."""
        nodes, workers = self.nodes, self.cluster.worker_ranks
        for ranges, holder in zip(self._ranges, self._holders, strict=True):
            if not nodes.same(self.cluster.rank, holder):
                n_senders = sum(not nodes.same(worker, holder) for worker in workers)
                yield from ((lo, hi, n_senders) for lo, hi in ranges)

    def gradient_nbytes(self) -> list[list[int]]:
        """Return the number of bytes of a gradient that a worker submits to a shard, by worker and shard."""
        in_memory = [sum(hi - lo for lo, hi in ranges) * self.plan.dtype.itemsize for ranges in self._ranges]
        sent = in_memory if self._routes is None else [self._routes.request_nbytes(rank) for rank in self._holders]
        pairs = list(zip(self._holders, in_memory, sent, strict=True))
        return [
            [memory if self.nodes.same(worker, holder) else message for holder, memory, message in pairs]
            for worker in self.cluster.worker_ranks
        ]

    def _calls(self, channel: Channel, server: int) -> ServerCalls:
        assert channel.client is not None
        return ServerCalls(channel.client, server)

    def _check_servers(self) -> None:
        if self.cluster.servers or len(set(self.nodes.of)) == 1:
            return
        raise ConfigError(
            f"--mode {self.plan.config.parallel.mode} without servers requires all ranks to share memory, but these "
            f"ranks form {len(set(self.nodes.of))} groups that share none (several hosts, or --no-shared-memory); "
            "pass --ps 1 or more",
            on_all_ranks=True,
        )

    def _allocate_shards(self) -> None:
        plan, shared, memory = self.plan, self._shared, self.memory
        local = [s for s, holder in enumerate(self._holders) if self.nodes.same(holder, self.cluster.rank)]
        if local:
            size, stride = plan.layout.size, row_stride(plan.layout.size)
            memory.vectors = {name: shared.allocate((stride,), plan.dtype)[:size] for name in plan.vectors}
            updater = plan.updater(memory.vectors, memory.frozen)
            for s in local:
                memory.shards[s] = Shard(shared, self._ranges[s], updater, memory.vectors, memory.frozen, self.waiting)

    def _make_routes(self) -> Routes | None:
        """Return the routes between workers and servers on other nodes; None if there are none. Collective."""
        cluster, nodes = self.cluster, self.nodes
        clients = {rank: [w for w in cluster.worker_ranks if not nodes.same(w, rank)] for rank in self._holders}
        if not any(clients.values()):
            if self.plan.config.compression is not None:
                _log.info("--compress has no effect: all workers share memory with all servers")
            return None
        plan = self.plan
        codec = None
        if plan.config.compression is not None:
            counts = {hi - lo for ranges in self._ranges for lo, hi in ranges}
            codec = make_vector_codec(plan.config.compression, plan.dtype, plan.layout, cluster.comm, counts)
        return Routes(
            comm=cluster.comm,
            clients=clients,
            ranges=dict(zip(self._holders, self._ranges, strict=True)),
            size=plan.layout.size,
            dtype=plan.dtype,
            n_extra=plan.workers * STATS_WORDS,
            codec=codec,
        )

    def _open_channels(self) -> None:
        """Open the channels between nodes, if there are routes. Collective over all ranks."""
        routes, servers = self._routes, self.plan.config.servers
        if routes is None:
            if servers.prefetch_params:
                _log.info("--prefetch-params has no effect: all workers share memory with all servers")
            return
        self.requests = Channel(*open_rpc(routes, servers.one_sided))
        if servers.prefetch_params:
            self._reads_comm = self.cluster.comm.Dup()
            reads = replace(routes, comm=self._reads_comm, codec=None, replies_only=True)
            self.reads = Channel(*open_rpc(reads, servers.one_sided))
        self.waiting.progress = self.cluster.comm.Iprobe


def _nodes(cluster: Cluster, plan: Plan, shares_gradients: bool) -> Nodes:
    """Return the nodes; each rank is its own node if memory cannot or must not be shared."""
    if plan.config.parallel.shared_memory:
        vectors = len(plan.vectors) + (cluster.node.size if shares_gradients else 0)
        nbytes = vectors * plan.nbytes
        problem = next(filter(None, cluster.comm.allgather(sharing_problem(cluster.node, nbytes))), "")
        if not problem:
            return Nodes(cluster.node, cluster.node_of)
        _log.info("ranks of a node cannot share memory and use messages instead: %s", problem)
    return Nodes(cluster.self_comm, list(range(cluster.size)))
