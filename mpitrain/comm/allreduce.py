"""Mean allreduce of a vector over all workers, on one node or several."""

from __future__ import annotations

from typing import Any

from ..core.kernels import sum_in_place
from ..core.layout import Array, row_stride
from .hierarchy import Hierarchy, ReduceScatter


class MeanAllreduce:
    """Averages vectors over the ranks of a hierarchy. Construction and calls are collective over them.

    The order of summation is fixed: first the ranks of a node, then the nodes.

    Args:
        scale: Factor applied to the sum; None for a mean.

    Attributes:
        own: Shape (size,): this rank's contribution, to be written before ``reduce``.
    """

    def __init__(self, hierarchy: Hierarchy, size: int, dtype: Any, scale: float | None = None) -> None:
        node, shared = hierarchy.node, hierarchy.shared
        self._hierarchy, self._size = hierarchy, size
        self._scale = 1.0 / hierarchy.comm.size if scale is None else scale
        self._rows = shared.allocate((node.size, row_stride(size)), dtype)
        self.own = self._rows[node.rank, :size]
        self._result = shared.allocate((row_stride(size),), dtype)[:size]
        crosses = hierarchy.n_nodes > 1 and hierarchy.internode is not None
        self._reduce_scatter = ReduceScatter(hierarchy, 0, size, dtype) if crosses else None
        self._phase = 0

    def __call__(self, vector: Array) -> None:
        """Replace ``vector``, shape (size,), with the mean over all ranks."""
        self.own[:] = vector
        vector[:] = self.reduce()

    def reduce(self) -> Array:
        """Return the mean of all ranks' ``own``, shape (size,), in memory shared by the node's ranks.

        The result is valid until this rank's next call; ``own`` may be overwritten immediately.
        """
        hierarchy, own = self._hierarchy, self.own
        self._wait_for_node()
        lo, hi = hierarchy.chunk(0, self._size)
        sum_in_place(self._rows, lo, hi, 1.0 if hierarchy.n_nodes > 1 else self._scale, hierarchy.node.rank)
        if self._reduce_scatter is not None:
            self._reduce_scatter.start(own)
            self._reduce_scatter.finish(own)
            lo, hi = hierarchy.owned_range(0, self._size)
            own[lo:hi] *= own.dtype.type(self._scale)
        self._result[lo:hi] = own[lo:hi]
        hierarchy.allgather(self._result, 0, self._size)
        self._wait_for_node()
        return self._result  # not overwritten before all ranks reach the next call

    def _wait_for_node(self) -> None:
        self._phase += 1
        self._hierarchy.barrier.publish(self._phase)
        self._hierarchy.barrier.wait(self._phase)
