"""Mean allreduce of a vector over all workers, on one node or several; it can overlap with other work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

from ..core.extra_state import ExtraState
from ..core.kernels import sum_in_place
from ..core.layout import Array, row_stride
from ..core.ranges import Bucket
from .hierarchy import Hierarchy
from .internode import CompressedSums, DividedSums, NodeSums, OneNodeSums
from .sum_order import SumOrder, sum_order
from .vector_codec import VectorCodec


class _Condition(NamedTuple):
    """A condition that an exchange waits for.

    Attributes:
        test: Returns whether it is fulfilled. Local.
        wait: Returns when it is fulfilled.
    """

    test: Callable[[], bool]
    wait: Callable[[], object]


class RangeAllreduce:
    """Averages a range of vectors over the ranks of a hierarchy, in phases between which ranks can compute.

    The order of summation is fixed: by default first the ranks of a node, then the nodes. All ranks construct it, and
    call ``start`` and ``finish``. Only one exchange of a hierarchy may be in progress at a time.

    Args:
        rows: Shape (order.n_rows, at least hi), shared by the ranks of a node: their contributions. Each rank writes
            its own rows before ``start``, and may not change them before ``finish`` has returned.
        result: Shape (at least hi,), shared by the ranks of a node, for the mean.
        lo, hi: The range.
        scale: Factor of the sum.
        apply: Called for each part of the range as ``apply(lo, hi, mean)``, to set ``result[lo:hi]``; ``mean`` has
            shape (hi - lo,). None to copy ``mean``. One rank calls ``apply`` for a part, and the other nodes get the
            result; with a codec, one rank of each node calls it.
        codec: Encodes ranges of the rows that are sent between nodes; None to send them unchanged.
        order: How the rows are added; None if each rank has one row, which are added in the order of nodes and ranks.
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
        codec: VectorCodec | None = None,
        order: SumOrder | None = None,
    ) -> None:
        self._lo, self._hi = lo, hi
        self._hierarchy, self._rows, self._result, self._scale = hierarchy, rows, result, scale
        self._order = order or sum_order(hierarchy, leaves=None)
        self._row = self._order.own[-1]  # to which this rank writes sums
        self._apply = self._set if apply is None else apply
        self._sums = self._make_sums(codec)
        self._bytes_sent = hierarchy.comm.allreduce(self._sums.bytes_sent)
        self._conditions: Iterator[_Condition] = iter(())
        self._condition: _Condition | None = None

    def start(self) -> None:
        """Start the exchange. Local; ``finish`` must follow."""
        self._conditions = self._exchange()
        self._condition = next(self._conditions)

    def progress(self) -> None:
        """Advance an exchange in progress as far as possible without waiting. Local."""
        while self._condition is not None and self._condition.test():
            self._condition = next(self._conditions, None)

    def finish(self) -> None:
        """Wait until the result is complete. It is valid until this rank's next ``start`` of this range."""
        while self._condition is not None:
            self._condition.wait()
            self._condition = next(self._conditions, None)
        self._hierarchy.count_exchange((self._hi - self._lo) * self._rows.itemsize, self._bytes_sent)

    def extra_state(self) -> ExtraState:
        """Return the compression error, on the first worker. Collective over the ranks."""
        return self._sums.extra_state()

    def load_extra_state(self, state: ExtraState) -> None:
        """Restore the compression error. Collective over the ranks."""
        self._sums.load_extra_state(state)

    def free(self) -> None:
        """Free communicators. Collective over the ranks."""
        self._sums.free()

    def _make_sums(self, codec: VectorCodec | None) -> NodeSums:
        part = slice(self._lo, self._hi)
        own, buckets = self._rows[self._row, part], [Bucket(0, self._hi - self._lo)]
        if self._hierarchy.n_nodes == 1:
            return OneNodeSums(self._hierarchy, buckets)
        if codec is None:
            return DividedSums(self._hierarchy, buckets, self._rows[:, part], self._order, self._result[part])
        return CompressedSums(self._hierarchy, buckets, own, codec.part(self._lo, self._hi))

    def _exchange(self) -> Iterator[_Condition]:
        """Exchange; yield each condition that must be fulfilled before the iterator is resumed."""
        hierarchy, sums = self._hierarchy, self._sums
        yield self._node_barrier()
        if hierarchy.n_nodes == 1:
            chunk = hierarchy.chunk(self._lo, self._hi)
            sum_in_place(self._rows, self._order.order, *chunk, self._scale, self._row)
            self._call(*chunk)
        else:
            for (lo, hi), (row, order) in product(sums.parts[0], self._order.sums):
                sum_in_place(self._rows, order, self._lo + lo, self._lo + hi, 1.0, row)
            sums.start(0)
            yield _Condition(lambda: sums.is_summed(0), lambda: None)
            sums.finish(0)
            for lo, hi in sums.owned[0]:
                mean = self._rows[self._row, self._lo + lo : self._lo + hi]
                mean *= mean.dtype.type(self._scale)
                self._call(self._lo + lo, self._lo + hi)
            sums.share(0)
            yield _Condition(lambda: sums.is_complete(0), lambda: None)
            sums.complete(0)
            sums.end_step()
        yield self._node_barrier()  # no rank changes its row before all have read it

    def _call(self, lo: int, hi: int) -> None:
        if lo < hi:
            self._apply(lo, hi, self._rows[self._row, lo:hi])

    def _set(self, lo: int, hi: int, mean: Array) -> None:
        self._result[lo:hi] = mean

    def _node_barrier(self) -> _Condition:
        barrier = self._hierarchy.barrier
        phase = barrier.advance()
        return _Condition(lambda: barrier.reached(phase), lambda: barrier.wait(phase))


class MeanAllreduce:
    """Averages vectors over the ranks of a hierarchy. Construction and calls are collective over these ranks.

    Args:
        scale: Factor applied to the sum; None for a mean.
        leaves: The number of vectors, which the ranks share out; they are added by a tree, so that the bits do not
            depend on the ranks. None if each rank has one vector.

    Attributes:
        order: How the rows are added.
        rows: Shape (order.n_rows, at least size), shared by the ranks of a node: their contributions.
        own: Shape (vectors of this rank, size): this rank's contribution, to be written before ``reduce``.
    """

    def __init__(
        self, hierarchy: Hierarchy, size: int, dtype: Any, scale: float | None = None, leaves: int | None = None
    ) -> None:
        shared, order = hierarchy.shared, sum_order(hierarchy, leaves, row_per_leaf=True)
        self.order, self.rows = order, shared.allocate((order.n_rows, row_stride(size)), dtype)
        self.own = self.rows[order.own[0] : order.own[-1] + 1, :size]
        self._result = shared.allocate((row_stride(size),), dtype)[:size]
        scale = 1.0 / (leaves or hierarchy.comm.size) if scale is None else scale
        self._exchange = RangeAllreduce(hierarchy, self.rows, self._result, 0, size, scale, order=order)

    def __call__(self, vectors: Array) -> None:
        """Replace each vector of this rank, shape (..., size), with the mean over all ranks."""
        self.own[:] = vectors
        vectors[:] = self.reduce()

    def reduce(self) -> Array:
        """Return the mean of all rows of all ranks, shape (size,), in memory shared by the node's ranks.

        The result is valid until this rank's next call; ``own`` may be overwritten immediately.
        """
        self._exchange.start()
        self._exchange.finish()
        return self._result  # the result is not overwritten before all ranks reach the next call

    def free(self) -> None:
        """Free communicators. Collective over the ranks."""
        self._exchange.free()
