"""Nodes and lanes: ranks share memory within a node and exchange ranges between nodes.

The ranks with the same place on every node form a *lane*. A vector is cut into one slice a lane, and each
slice into one piece a node; the rank of that lane and node owns the piece: it alone sums and updates it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.kernels import sum_rows
from ..core.layout import Array
from ..core.ranges import aligned_part
from .cluster import Cluster
from .mpi import MPI, mpi_type
from .phase_barrier import PhaseBarrier
from .shared_memory import SharedArrays, sharing_problem


class Hierarchy:
    """How the ranks of ``comm`` reach each other.

    Construction and ``free`` are collective over ``comm``.

    Args:
        comm: The ranks that average.
        node: Those of them on this node; a communicator of one rank where memory cannot be shared.
        cores: Cores that the node's ranks may use.

    Attributes:
        cores: As given.
        lane: The owners of this rank's slice, one a node, in the order of the nodes; None for a rank that
            owns nothing, since some other node has fewer ranks.
        n_lanes: Slices that a vector is cut into: the ranks of the smallest node.
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
        self.n_nodes = len(set(comm.allgather(leader)))

    def chunk(self, lo: int, hi: int) -> tuple[int, int]:
        """This lane's range of [lo, hi); empty for a rank without a lane."""
        return aligned_part(lo, hi, self.node.rank, self.n_chunks) if self.internode is not None else (lo, lo)

    def owned_range(self, lo: int, hi: int, node: int | None = None) -> tuple[int, int]:
        """The range of [lo, hi) that this rank owns, or that ``node``'s rank of this lane does."""
        start, stop = self.chunk(lo, hi)
        if self.internode is None:
            return start, stop
        return aligned_part(start, stop, self.internode.rank if node is None else node, self.n_nodes)

    def allgather(self, vector: Array, lo: int, hi: int) -> None:
        """Bring the pieces of a node-shared vector's [lo, hi) to every node; collective over the lane."""
        if self.internode is None or self.n_nodes == 1:
            return
        owned = [self.owned_range(lo, hi, node) for node in range(self.n_nodes)]
        counts, starts = [b - a for a, b in owned], [a for a, _ in owned]
        self.internode.Allgatherv(MPI.IN_PLACE, [vector, (counts, starts), mpi_type(vector.dtype)])

    def free(self) -> None:
        """Give memory and communicators back."""
        self.shared.free()
        if self.internode is not None:
            self.internode.Free()


def hierarchy_of(cluster: Cluster, nbytes: int, share: bool, say: Callable[[str], None]) -> Hierarchy:
    """The workers' hierarchy for about ``nbytes`` of vectors a node; collective over the workers.

    Where some node cannot share memory (or ``share`` is False) every rank counts as a node of its own: the
    same sums then travel by MPI.
    """
    if share:
        problems = cluster.workers.allgather(sharing_problem(cluster.training.node, nbytes))
        problem = next(filter(None, problems), "")
        if not problem:
            return Hierarchy(cluster.workers, cluster.training.node, cluster.cores)
        say(f"ranks of a node do not share memory, they send instead: {problem}")
    return Hierarchy(cluster.workers, cluster.self_comm, cluster.cores)


class ReduceScatter:
    """Sums one range over the nodes: started when the node's own sum is ready, finished later.

    A reduce-scatter by all-to-all, with the sum taken in the order of the nodes, so that the result does not
    depend on the MPI library or on timing.
    """

    def __init__(self, hierarchy: Hierarchy, lo: int, hi: int, dtype: Any) -> None:
        assert hierarchy.internode is not None
        self._internode = hierarchy.internode
        self.lo, self.hi = hierarchy.owned_range(lo, hi)
        n = hierarchy.n_nodes
        owned = [hierarchy.owned_range(lo, hi, node) for node in range(n)]
        self._send = ([b - a for a, b in owned], [a for a, _ in owned])
        count = self.hi - self.lo
        self._received = np.zeros((n, count), dtype)
        self._recv = ([count] * n, [count * node for node in range(n)])
        self._type = mpi_type(np.dtype(dtype))
        self._request = MPI.REQUEST_NULL

    def start(self, vector: Array) -> None:
        """Send every node its piece of ``vector``, which must stay as it is until ``finish``."""
        self._request = self._internode.Ialltoallv(
            [vector, self._send, self._type], [self._received, self._recv, self._type]
        )

    def progress(self) -> None:
        """Let MPI move data, while this rank is about to compute again."""
        self._request.Test()

    def finish(self, out: Array) -> None:
        """Wait, and write the sum over the nodes to ``out[lo:hi]``, the piece of this rank."""
        self._request.Wait()
        sum_rows(self._received, np.arange(len(self._received)), 0, self.hi - self.lo, 1.0, out[self.lo : self.hi])
