"""Sums of a vector over the ranks of a communicator, of which each rank adds up a range.

An all-to-all sends every rank its range of all vectors (a reduce-scatter), and an allgather returns the sums. (Thakur,
Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.) Values are added in the
order of the ranks, so that a sum depends neither on the MPI library nor on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ..core.kernels import sum_rows
from ..core.layout import Array
from ..core.ranges import Range
from .mpi import MPI, mpi_type

Add = Callable[[Array, Array], None]  # writes the sum of the first argument's rows to the second argument


def add_rows(rows: Array, out: Array) -> None:
    """Set ``out``, shape (m,), to the sum of ``rows``, shape (n, m), in their order."""
    in_order(np.arange(len(rows)))(rows, out)


def in_order(order: Array) -> Add:
    """Return ``add_rows`` for another order; see ``core.sum_tree``."""
    return lambda rows, out: sum_rows(rows, order, 0, rows.shape[1], 1.0, out)


class Exchange:
    """A sum over the ranks of a communicator. Construction is local.

    ``start`` and ``share`` are collective over the ranks, in the same order on all of them, and do not wait.

    Args:
        ranges: The range that each rank adds up. If these are the whole vector, nothing need be shared.
        dtype: The data type of the vectors.
        add: Called as ``add(rows, out)`` to write the sum of ``rows``, shape (sum(counts), hi - lo), to ``out``, shape
            (hi - lo,).
        counts: The number of vectors of each rank, whose ranges are consecutive rows; by default 1.
        allocate: Returns memory for ``rows``, from a shape and a data type; the vectors are in the same kind of memory.

    Attributes:
        lo, hi: This rank's range.
        requests: The operations that ``start`` has begun.
        bytes_scattered, bytes_shared: Number of bytes that ``start`` and ``share`` send to other ranks.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranges: Sequence[Range],
        dtype: Any,
        add: Add = add_rows,
        allocate: Callable[[tuple[int, int], Any], Array] = np.zeros,
        counts: Sequence[int] | None = None,
    ) -> None:
        self._comm, self._add, self._type = comm, add, mpi_type(np.dtype(dtype))
        self._pieces = pieces_of(ranges)
        self.lo, self.hi = ranges[comm.rank]
        counts = counts or [1] * comm.size
        count, first = self.hi - self.lo, [*accumulate(counts, initial=0)]
        self._rows = allocate((first[-1], count), dtype)
        # The message that receives the vectors with the same index of all ranks that have so many.
        self._received = [
            [
                self._rows,
                ([count * (index < n) for n in counts], [count * min(row + index, first[-1]) for row in first[:-1]]),
                self._type,
            ]
            for index in range(max(counts))
        ]
        width = np.dtype(dtype).itemsize
        self.bytes_scattered = width * (sum(self._pieces[0]) - count) * counts[comm.rank]
        self.bytes_shared = width * count * (comm.size - 1)
        self.requests: list[MPI.Request] = []

    def start(self, *vectors: Array) -> None:
        """Send every rank its range of this rank's vectors, which must not change until ``finish``."""
        nothing = [vectors[0], ([0] * self._comm.size, self._pieces[1]), self._type]
        messages = [*map(self.message, vectors), *[nothing] * (len(self._received) - len(vectors))]
        self.requests = [*map(self._comm.Ialltoallv, messages, self._received)]

    def has_arrived(self) -> bool:
        """Let MPI move data; return whether ``finish`` would not wait."""
        return bool(MPI.Request.Testall(self.requests))

    def finish(self, out: Array) -> None:
        """Wait, and write the sum of this rank's range to ``out[lo:hi]``."""
        MPI.Request.Waitall(self.requests)
        if self.lo < self.hi:
            self._add(self._rows, out[self.lo : self.hi])

    def share(self, vector: Array, comm: MPI.Intracomm | None = None) -> MPI.Request:
        """Begin to send ``vector[lo:hi]`` to all other ranks, and to receive their ranges.

        Args:
            comm: Communicator of the same ranks to use instead, because operations of one communicator must start in
                the same order on all ranks.
        """
        return (comm or self._comm).Iallgatherv(MPI.IN_PLACE, self.message(vector))

    def message(self, vector: Array) -> list[Any]:
        """Return ``vector`` as a message of MPI that consists of all ranges."""
        return [vector, self._pieces, self._type]


def pieces_of(ranges: Sequence[Range]) -> tuple[list[int], list[int]]:
    """Return the lengths of ranges, and their first elements, as MPI needs them."""
    return [hi - lo for lo, hi in ranges], [lo for lo, _ in ranges]
