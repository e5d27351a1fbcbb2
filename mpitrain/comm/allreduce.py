"""Mean allreduce of a vector over all workers, on one node or several; it can run behind other work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..core.kernels import sum_in_place
from ..core.layout import Array, row_stride
from .hierarchy import Hierarchy, ReduceScatter


class _Condition(NamedTuple):
    """What an exchange waits for.

    Attributes:
        test: Returns whether it is fulfilled. Local.
        wait: Returns when it is.
    """

    test: Callable[[], bool]
    wait: Callable[[], object]


class RangeAllreduce:
    """Averages a range of vectors over the ranks of a hierarchy, in steps between which ranks can compute.

    The order of summation is fixed: first the ranks of a node, then the nodes. All ranks construct it, and call
    ``start`` and ``finish``. Only one exchange of a hierarchy may be in progress at a time.

    Args:
        rows: Shape (node.size, at least hi), shared by the ranks of a node: their contributions. Each rank writes its
            own before ``start``, and may not change it before ``finish`` has returned.
        result: Shape (at least hi,), shared by the ranks of a node, for the mean.
        lo, hi: The range.
        scale: Factor of the sum.
        apply: Called once for each part of the range as ``apply(lo, hi, mean)``, on one rank of all, to set
            ``result[lo:hi]``, which all nodes then get; ``mean`` has shape (hi - lo,). None to set it to ``mean``.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        rows: Array,
        result: Array,
        lo: int,
        hi: int,
        scale: float,
        apply: Callable[[int, int, Array], object] | None = None,
    ) -> None:
        self.lo, self.hi = lo, hi
        self._hierarchy, self._rows, self._result, self._scale = hierarchy, rows, result, scale
        self._apply = self._set if apply is None else apply
        crosses = hierarchy.n_nodes > 1 and hierarchy.internode is not None
        self._reduce_scatter = ReduceScatter(hierarchy, lo, hi, rows.dtype) if crosses else None
        self._conditions: Iterator[_Condition] = iter(())
        self._condition: _Condition | None = None

    def start(self) -> None:
        """Start the exchange. Local; ``finish`` must follow."""
        self._conditions = self._exchange()
        self._condition = next(self._conditions)

    def progress(self) -> None:
        """Do what is possible without waiting, if an exchange is in progress. Local."""
        while self._condition is not None and self._condition.test():
            self._condition = next(self._conditions, None)

    def finish(self) -> None:
        """Wait until the result is complete. It is valid until this rank's next ``start`` of this range."""
        while self._condition is not None:
            self._condition.wait()
            self._condition = next(self._conditions, None)

    def _exchange(self) -> Iterator[_Condition]:
        """Exchange; yield what must be fulfilled before the iterator is resumed."""
        hierarchy, own = self._hierarchy, self._rows[self._hierarchy.node.rank]
        yield self._node_barrier()
        lo, hi = hierarchy.chunk(self.lo, self.hi)
        sum_in_place(self._rows, lo, hi, 1.0 if hierarchy.n_nodes > 1 else self._scale, hierarchy.node.rank)
        if self._reduce_scatter is not None:
            self._reduce_scatter.start(own)
            yield _Condition(self._reduce_scatter.progress, self._reduce_scatter.wait)
            self._reduce_scatter.finish(own)
            lo, hi = hierarchy.owned_range(self.lo, self.hi)
            own[lo:hi] *= own.dtype.type(self._scale)
        if lo < hi:
            self._apply(lo, hi, own[lo:hi])
        if self._reduce_scatter is not None:
            request = hierarchy.start_allgather(self._result, self.lo, self.hi)
            yield _Condition(request.Test, request.Wait)
        yield self._node_barrier()  # no rank changes its row before all have read it

    def _set(self, lo: int, hi: int, mean: Array) -> None:
        self._result[lo:hi] = mean

    def _node_barrier(self) -> _Condition:
        barrier, phase = self._hierarchy.barrier, self._hierarchy.next_phase()
        return _Condition(lambda: barrier.reached(phase), lambda: barrier.wait(phase))


class MeanAllreduce:
    """Averages vectors over the ranks of a hierarchy. Construction and calls are collective over them.

    Args:
        scale: Factor applied to the sum; None for a mean.

    Attributes:
        rows: Shape (node.size, at least size), shared by the ranks of a node: their contributions.
        own: Shape (size,): this rank's contribution, to be written before ``reduce``.
    """

    def __init__(self, hierarchy: Hierarchy, size: int, dtype: Any, scale: float | None = None) -> None:
        node, shared = hierarchy.node, hierarchy.shared
        self.rows = shared.allocate((node.size, row_stride(size)), dtype)
        self.own = self.rows[node.rank, :size]
        self._result = shared.allocate((row_stride(size),), dtype)[:size]
        scale = 1.0 / hierarchy.comm.size if scale is None else scale
        self._exchange = RangeAllreduce(hierarchy, self.rows, self._result, 0, size, scale)

    def __call__(self, vector: Array) -> None:
        """Replace ``vector``, shape (size,), with the mean over all ranks."""
        self.own[:] = vector
        vector[:] = self.reduce()

    def reduce(self) -> Array:
        """Return the mean of all ranks' ``own``, shape (size,), in memory shared by the node's ranks.

        The result is valid until this rank's next call; ``own`` may be overwritten immediately.
        """
        self._exchange.start()
        self._exchange.finish()
        return self._result  # not overwritten before all ranks reach the next call
