"""Hierarchy of nodes: ranks share memory within a node and exchange ranges between nodes.

Ranks with the same index on every node share an inter-node communicator. A vector is split into one chunk per
inter-node communicator, and each chunk into one owned range per node. The owner of a range sums it over the nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from ..core.layout import Array
from ..core.ranges import Range, aligned_range
from .cluster import Cluster
from .exchange import Add, Exchange, add_rows, pieces_of
from .mpi import MPI, mpi_type
from .phase_barrier import PhaseBarrier
from .shared_memory import SharedArrays, sharing_problem

_log = logging.getLogger(__name__)


class Hierarchy:
    """Communicators within and between the nodes of ``comm``.

    Construction and ``free`` are collective over ``comm``.

    Args:
        comm: The ranks that average.
        node: The ranks of ``comm`` on this node; a communicator of one rank if memory cannot be shared.
        cores: Number of cores available to the node's ranks.

    Attributes:
        cores: As given.
        internode: The owners of this rank's chunk, one per node, in the order of the nodes. None on a rank that owns
            nothing, because another node has fewer ranks.
        n_chunks: Number of chunks of a vector: the number of ranks on the smallest node.
        n_nodes: Number of nodes.
        members: The ranks of each node, by their numbers in ``comm``; nodes and ranks in their order.
        internode_bytes: Bytes that all ranks have sent to other nodes in the exchanges that were counted.
        uncompressed_bytes: Bytes that the ranks would have sent without a codec.
    """

    def __init__(self, comm: MPI.Intracomm, node: MPI.Intracomm, cores: int) -> None:
        self.comm, self.node, self.cores = comm, node, cores
        self.shared = SharedArrays(node)
        self.barrier = PhaseBarrier(self.shared, cores)
        self.n_chunks = comm.allreduce(node.size, op=MPI.MIN)
        leader = node.bcast(comm.rank, root=0)
        owns = node.rank < self.n_chunks
        self.internode: MPI.Intracomm | None = None
        internode: Any = comm.Split(node.rank if owns else MPI.UNDEFINED, key=leader)
        if owns:
            self.internode = internode
        places = sorted((*place, number) for number, place in enumerate(comm.allgather((leader, node.rank))))
        self.members = [[number for *_, number in group] for _, group in groupby(places, key=itemgetter(0))]
        self.n_nodes = len(self.members)
        self.internode_bytes = self.uncompressed_bytes = 0

    def count_exchange(self, nbytes: int, bytes_sent: int) -> None:
        """Count an exchange of a vector of ``nbytes``, for which all ranks together have sent ``bytes_sent``. Local.

        Without a codec, a node first sends to each other node the range of the gradient which that node owns. Then it
        sends its own range of the result to all other nodes.
        """
        self.internode_bytes += bytes_sent
        self.uncompressed_bytes += 2 * (self.n_nodes - 1) * nbytes

    def chunk(self, lo: int, hi: int) -> Range:
        """Return this rank's chunk of [lo, hi); empty if the rank has no inter-node communicator."""
        return aligned_range(lo, hi, self.node.rank, self.n_chunks) if self.internode is not None else (lo, lo)

    def owned_range(self, lo: int, hi: int) -> Range:
        """Return the range of [lo, hi) that this rank owns."""
        return self.owned_ranges(lo, hi)[0 if self.internode is None else self.internode.rank]

    def owned_ranges(self, lo: int, hi: int) -> list[Range]:
        """Return the ranges of this rank's chunk of [lo, hi) that its owners have, one per node."""
        return [aligned_range(*self.chunk(lo, hi), node, self.n_nodes) for node in range(self.n_nodes)]

    def exchange(
        self, lo: int, hi: int, dtype: Any, add: Add = add_rows, counts: Sequence[int] | None = None
    ) -> Exchange:
        """Return an exchange that sums this rank's chunk of [lo, hi) over the nodes. Local; only for owners.

        Args:
            add, counts: See ``Exchange``.
        """
        assert self.internode is not None
        return Exchange(self.internode, self.owned_ranges(lo, hi), dtype, add, counts=counts)

    @property
    def n_owners(self) -> int:
        """Number of ranks that own ranges."""
        return self.n_chunks * self.n_nodes

    def owner(self, node: int | None = None) -> int:
        """Return this rank's index among the owners, or the index of ``node``'s rank with the same chunk."""
        assert self.internode is not None
        return self.node.rank * self.n_nodes + (self.internode.rank if node is None else node)

    def allgather(self, vector: Array, lo: int, hi: int) -> None:
        """Gather the owned ranges of [lo, hi) of a node-shared vector on every node. Collective over ``internode``."""
        if self.internode is not None and self.n_nodes > 1:
            self._allgather(vector, self.owned_ranges(lo, hi))

    def allgather_ranges(self, vector: Array, ranges: Sequence[Range]) -> None:
        """Gather ranges of a node-shared vector, one for each owner, on every node. Collective over ``internode``."""
        if self.internode is not None and self.n_nodes > 1:
            self._allgather(vector, [ranges[self.owner(node)] for node in range(self.n_nodes)])

    def _allgather(self, vector: Array, owned: Sequence[Range]) -> None:
        """Gather the ranges that the owners of this rank's chunk have, one per node."""
        assert self.internode is not None
        self.internode.Allgatherv(MPI.IN_PLACE, [vector, pieces_of(owned), mpi_type(vector.dtype)])

    def free(self) -> None:
        """Free memory and communicators."""
        self.shared.free()
        if self.internode is not None:
            self.internode.Free()


def hierarchy_of(cluster: Cluster, nbytes: int, share: bool) -> Hierarchy:
    """Return the workers' hierarchy for about ``nbytes`` of vectors per node. Collective over the workers.

    If a node cannot share memory, or ``share`` is False, every rank counts as a separate node. The ranks of a node then
    exchange MPI messages, too.
    """
    if share:
        problems = cluster.workers.allgather(sharing_problem(cluster.training.node, nbytes))
        problem = next(filter(None, problems), "")
        if not problem:
            return Hierarchy(cluster.workers, cluster.training.node, cluster.cores)
        _log.info("ranks of a node cannot share memory and use messages instead: %s", problem)
    return Hierarchy(cluster.workers, cluster.self_comm, cluster.cores)
