"""PowerSGD: the gradient of a matrix as the product of two thin factors, with error feedback.

Vogels, Karimireddy and Jaggi, PowerSGD: practical low-rank gradient compression for distributed optimization, NeurIPS
2019, algorithms 1 and 2. For the gradient M (n x m) of a node, error included, and Q (m x r) of the last step::

    P = sum over nodes of M Q, orthogonalized;  Q = sum over nodes of M^T P;  all nodes update with P Q^T

The ranks of a node divide the rows of each matrix. A rank sums its rows of M over the node, and computes its rows of P.
It then sums these rows over the nodes, with the ranks of the same index. Q depends on all rows of M: each rank of the
node computes a part, and the ranks divide the sum over parts and nodes. Therefore the computation and the bytes are
divided, and no rank needs the sum of a whole matrix. The ranks of a node share only the factors, with four barriers. If
whole matrices were assigned to ranks, ranks would be idle when one matrix has most of the elements. The ranges of other
codecs would cut rows.

Vectors, such as biases, and matrices whose factors are not much smaller are summed unchanged, together with P.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.extra_state import ExtraState, Versioned, values_of
from ..core.kernels import kernel, sum_rows
from ..core.layout import Array, Layout
from ..core.ranges import Bucket, Range, aligned_range
from .exchange import Exchange
from .hierarchy import Hierarchy
from .internode import NAMESPACE, NodeSums, Residual
from .phase_barrier import PhaseBarrier

_LEAST_GAIN = 2  # the factors of a compressed matrix have less than half of its elements, as in PyTorch


class PowerSums(NodeSums):
    """Sums low-rank approximations of gradients; see the module's description.

    Args:
        rank: The rank r of the factors.
        grads: Shape (layout.size,): this rank's row of the node's gradients.
        seed: Seed of the first factors Q, which must be the same on all ranks.
    """

    def __init__(
        self, hierarchy: Hierarchy, buckets: Sequence[Bucket], layout: Layout, grads: Array, rank: int, seed: int
    ) -> None:
        shared, node, dtype = hierarchy.shared, hierarchy.node, grads.dtype
        self._hierarchy, self._grads, self._seed = hierarchy, grads, seed
        self._residual = Residual(hierarchy, len(grads), dtype)
        shapes = list(matrices(layout, rank))
        self._p = shared.allocate((sum(shape.n for shape in shapes) * rank,), dtype)
        self._q = shared.allocate((sum(shape.m for shape in shapes) * rank,), dtype)
        self._q_parts = shared.allocate((node.size, len(self._q)), dtype)
        self._q_parts[node.rank] = 0
        self._barrier = PhaseBarrier(shared, hierarchy.cores)

        dense = [[hierarchy.chunk(*part) for part in _without(bucket, shapes)] for bucket in buckets]
        rows = [_rows_of(hierarchy, shape) for shape in shapes]
        n_dense = sum(hi - lo for ranges in dense for lo, hi in ranges)
        n_rows = sum(hi - lo for lo, hi in rows)
        lo, hi = aligned_range(0, len(self._q), node.rank, hierarchy.n_chunks)
        self._own_q = slice(lo, hi) if hierarchy.internode is not None else slice(0, 0)
        self._first = _NodesSum(hierarchy, n_dense + n_rows * rank, dtype)
        self._second = _NodesSum(hierarchy, self._own_q.stop - self._own_q.start, dtype)
        self.bytes_sent = self._first.bytes_sent + self._second.bytes_sent

        self._matrices, at, p, q = [], n_dense, 0, 0
        for shape, own in zip(shapes, rows, strict=True):
            self._matrices.append(_Matrix(self, shape, own, rank, at, p, q))
            at, p, q = at + (own[1] - own[0]) * rank, p + shape.n * rank, q + shape.m * rank
        self._of_bucket = [[m for m in self._matrices if lo <= m.shape.start < hi] for lo, hi in buckets]
        self._dense = [part for ranges in dense for part in ranges]
        self.parts = self.owned = [
            [*ranges, *(matrix.range for matrix in matrices)]
            for ranges, matrices in zip(dense, self._of_bucket, strict=True)
        ]
        if node.rank == 0:
            self._q[:] = self._first_q()
        node.Barrier()

    def start(self, index: int) -> None:
        for matrix in self._of_bucket[index]:
            matrix.add_error()
            np.matmul(matrix.grads, matrix.q, out=matrix.own_p)

    def finish(self, index: int) -> None:
        if index == 0:
            self._sum_unchanged_and_p()
            for matrix in self._matrices:
                _orthogonalize(matrix.p.T)
            self._sum_q()
            is_finite = bool(np.isfinite(self._q).all())
            for matrix in self._matrices:
                matrix.replace(is_finite)
            self._barrier.meet()  # all ranks have read Q
            self._prepare_next(is_finite)

    def extra_state(self) -> ExtraState:
        values: dict[str, Any] = self._residual.of_nodes()
        return {NAMESPACE: Versioned(1, values | {"q": self._q.copy()})} if values else {}

    def load_extra_state(self, state: ExtraState) -> None:
        values = values_of(state, NAMESPACE, 1)
        self._residual.load(values)
        q = np.asarray(values.get("q", ()))
        if q.shape == self._q.shape and self._hierarchy.node.rank == 0:
            self._q[:] = q
        self._hierarchy.node.Barrier()

    def _sum_unchanged_and_p(self) -> None:
        """Sum this rank's part of the uncompressed ranges and of P over the nodes; share P with the node."""
        start = 0
        for lo, hi in self._dense:
            self._first.values[start : start + hi - lo] = self._grads[lo:hi]
            start += hi - lo
        self._first.reduce()
        start = 0
        for lo, hi in self._dense:
            self._grads[lo:hi] = self._first.values[start : start + hi - lo]
            start += hi - lo
        for matrix in self._matrices:
            matrix.shared_p[:] = matrix.own_p
        self._barrier.meet()
        for matrix in self._matrices:
            matrix.p[:] = matrix.whole_p

    def _sum_q(self) -> None:
        for matrix in self._matrices:
            np.matmul(matrix.grads.T, matrix.p[matrix.rows], out=matrix.q_part)
        self._barrier.meet()
        own = self._own_q
        if own.stop > own.start:
            order = np.arange(self._hierarchy.n_chunks)
            sum_rows(self._q_parts, order, own.start, own.stop, 1.0, self._second.values)
        self._second.reduce()
        self._q[own] = self._second.values
        self._barrier.meet()

    def _prepare_next(self, is_finite: bool) -> None:
        """Replace columns of Q that would stay zero, or all if a gradient was not finite.

        If the gradient has a lower rank, a column of P is zero. The same column of Q is then zero, too, and so is the
        column of P in the next step.
        """
        if self._hierarchy.node.rank == 0:
            first = self._first_q()
            if not is_finite:
                self._q[:] = first
            for matrix in self._matrices:
                missing = ~matrix.p.any(axis=0)
                matrix.q[:, missing] = matrix.q_of(first)[:, missing]

    def _first_q(self) -> Array:
        return np.random.default_rng(self._seed).standard_normal(len(self._q)).astype(self._q.dtype)


class MatrixShape(NamedTuple):
    """An entry of the layout as a matrix: its first element, and its numbers of rows and columns."""

    start: int
    n: int
    m: int


class _Matrix:
    """A compressed matrix, and this rank's part of it.

    Attributes:
        shape, rows: The matrix, and the rows of this rank.
        range: The range of the vector that holds these rows.
        grads: Shape (rows, m): their gradient.
        own_p: Shape (rows, r): their product with Q, in the message to other nodes.
        shared_p, whole_p: Shape (rows, r) and (n, r): in memory shared by the node.
        p: Shape (n, r): this rank's copy, orthogonalized.
        q, q_part: Shape (m, r): Q, shared by the node, and this rank's summand of the next Q.
    """

    def __init__(self, sums: PowerSums, shape: MatrixShape, rows: Range, rank: int, at: int, p: int, q: int) -> None:
        lo, hi = rows
        self.shape, self.rows, self._rank, self._at_q = shape, slice(lo, hi), rank, q
        self._share = 1 / sums._hierarchy.n_nodes
        self.range = shape.start + lo * shape.m, shape.start + hi * shape.m
        part = slice(*self.range)
        self.grads = sums._grads[part].reshape(hi - lo, shape.m)
        self._error = sums._residual.own[part].reshape(hi - lo, shape.m)
        self.own_p = sums._first.values[at : at + (hi - lo) * rank].reshape(hi - lo, rank)
        self.whole_p = sums._p[p : p + shape.n * rank].reshape(shape.n, rank)
        self.shared_p, self.p = self.whole_p[lo:hi], np.empty_like(self.whole_p)
        self.q, self.q_part = self.q_of(sums._q), self.q_of(sums._q_parts[sums._hierarchy.node.rank])

    def q_of(self, values: Array) -> Array:
        """Return the matrix's part of a vector of all factors Q."""
        return values[self._at_q : self._at_q + self.shape.m * self._rank].reshape(self.shape.m, self._rank)

    def add_error(self) -> None:
        self.grads += self._error

    def replace(self, is_finite: bool) -> None:
        """Replace the gradient by the approximation of the sum, and the error by gradient minus this node's share."""
        np.matmul(self.p[self.rows], self.q.T, out=self._error)
        _swap(self.grads.reshape(-1), self._error.reshape(-1), self._share)
        if not is_finite:
            self._error[:] = 0


class _NodesSum:
    """Sums a short vector over the ranks with the same index on all nodes, in the order of the nodes.

    Attributes:
        values: Shape (count,): this rank's contribution, and then the sum.
        bytes_sent: Number of bytes that this rank sends in a call.
    """

    def __init__(self, hierarchy: Hierarchy, count: int, dtype: Any) -> None:
        self.values, self.bytes_sent, comm = np.zeros(count, dtype), 0, hierarchy.internode
        self._exchange: Exchange | None = None
        if comm is not None:
            # Two nodes exchange all values in one message; with more nodes, each sums a range, in two messages.
            self._shares = comm.size > 2
            parts = comm.size if self._shares else 1
            ranges = [aligned_range(0, count, node % parts, parts) for node in range(comm.size)]
            self._exchange = Exchange(comm, ranges, dtype)
            self.bytes_sent = self._exchange.bytes_scattered + self._shares * self._exchange.bytes_shared

    def reduce(self) -> None:
        """Sum. Collective over the ranks with the same index."""
        if self._exchange is not None:
            self._exchange.start(self.values)
            self._exchange.finish(self.values)
            if self._shares:
                self._exchange.share(self.values).Wait()


def compresses_any(layout: Layout, rank: int) -> bool:
    """Return whether any parameter is compressed with factors of rank ``rank``."""
    return any(True for _ in matrices(layout, rank))


def matrices(layout: Layout, rank: int) -> Iterator[MatrixShape]:
    """Yield the parameters whose factors of rank ``rank`` are much smaller, as the matrices closest to square."""
    for entry in layout.entries:
        if entry.kind != "param" or len(entry.shape) < 2:
            continue
        heights = [math.prod(entry.shape[:axis]) for axis in range(1, len(entry.shape))]
        n = max(heights, key=lambda height: min(height, entry.size // max(height, 1)))
        m = entry.size // max(n, 1)
        if _LEAST_GAIN * (n + m) * rank < n * m:
            yield MatrixShape(entry.start, n, m)


def _without(bucket: Bucket, shapes: Sequence[MatrixShape]) -> list[Range]:
    """Return the ranges of a bucket that are in no matrix."""
    ranges, start = [], bucket.lo
    for shape in shapes:
        if bucket.lo <= shape.start < bucket.hi:
            ranges.append((start, shape.start))
            start = shape.start + shape.n * shape.m
    return [(lo, hi) for lo, hi in [*ranges, (start, bucket.hi)] if lo < hi]


def _rows_of(hierarchy: Hierarchy, shape: MatrixShape) -> Range:
    """Return the rows of a matrix that this rank sums."""
    index, parts = hierarchy.node.rank, hierarchy.n_chunks
    if hierarchy.internode is None:
        return 0, 0
    return shape.n * index // parts, shape.n * (index + 1) // parts


@kernel
def _orthogonalize(columns: Array) -> None:
    """Make the rows of ``columns``, shape (r, n), orthonormal, by the modified Gram-Schmidt process.

    A row that is, up to rounding, a linear combination of earlier rows becomes zero.
    """
    zero = columns.dtype.type(0)
    for i in range(columns.shape[0]):
        before = zero
        for k in range(columns.shape[1]):
            before += columns[i, k] * columns[i, k]
        for j in range(i):
            product = zero
            for k in range(columns.shape[1]):
                product += columns[i, k] * columns[j, k]
            for k in range(columns.shape[1]):
                columns[i, k] -= product * columns[j, k]
        after = zero
        for k in range(columns.shape[1]):
            after += columns[i, k] * columns[i, k]
        factor = columns.dtype.type(1) / np.sqrt(after) if after > columns.dtype.type(1e-10) * before else zero
        if after != after:
            factor = after
        for k in range(columns.shape[1]):
            columns[i, k] *= factor


@kernel
def _swap(grads: Array, error: Array, share: float) -> None:
    """Set ``grads`` to ``error``, which holds the approximation, and ``error`` to ``grads - share * approximation``."""
    factor = grads.dtype.type(share)
    for i in range(grads.size):
        approximation = error[i]
        error[i] = grads[i] - factor * approximation
        grads[i] = approximation
