"""The mean of a vector that every worker holds, over all of them, on one node or several."""

from __future__ import annotations

from typing import Any

from ..core.kernels import sum_in_place
from ..core.layout import Array
from .hierarchy import Hierarchy, ReduceScatter
from .shared_memory import row_stride


class MeanAllreduce:
    """Takes means over the ranks of a hierarchy; construction and calls are collective over them.

    The sum is taken in the order of the ranks of a node, then of the nodes.

    Args:
        scale: What the sum is multiplied by; None for a mean.

    Attributes:
        own: Shape (size,): what this rank gives, to be written before ``reduce``.
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
        """Replace ``vector``, shape (size,), by the mean of all ranks' vectors."""
        self.own[:] = vector
        vector[:] = self.reduce()

    def reduce(self) -> Array:
        """The mean of what all ranks have written to ``own``, shape (size,), the same memory for a node's ranks.

        It may be read until this rank calls again, and ``own`` be written at once.
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
        return self._result  # nobody writes it before all have met again, in the next call

    def _wait_for_node(self) -> None:
        self._phase += 1
        self._hierarchy.barrier.publish(self._phase)
        self._hierarchy.barrier.wait(self._phase)
