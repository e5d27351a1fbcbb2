"""Sums of a vector over the ranks of a communicator, of which each rank adds up a range.

An all-to-all sends every rank its range of all vectors (a reduce-scatter), and an allgather returns the sums. (Thakur,
Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.) Values are added in the
order of the ranks, so that a sum depends neither on the MPI library nor on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.kernels import sum_rows
from ..core.layout import Array
from ..core.ranges import Range
from .mpi import MPI, mpi_type


def add_rows(rows: Array, out: Array) -> None:
    """Set ``out``, shape (m,), to the sum of ``rows``, shape (n, m), in their order."""
    sum_rows(rows, np.arange(len(rows)), 0, rows.shape[1], 1.0, out)


class Exchange:
    """A sum over the ranks of a communicator. Construction is local.

    ``start`` and ``share`` are collective over the ranks, in the same order on all of them, and do not wait.

    Args:
        ranges: The range that each rank adds up. If these are the whole vector, nothing need be shared.
        dtype: The data type of the vectors.
        add: Called as ``add(rows, out)`` to write the sum of ``rows``, shape (comm.size, hi - lo), to ``out``, shape
            (hi - lo,).
        allocate: Returns memory for ``rows``, from a shape and a data type; the vectors are in the same kind of memory.

    Attributes:
        lo, hi: This rank's range.
        request: The operation that ``start`` has begun; complete before that.
        bytes_scattered, bytes_shared: Number of bytes that ``start`` and ``share`` send to other ranks.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranges: Sequence[Range],
        dtype: Any,
        add: Callable[[Array, Array], None] = add_rows,
        allocate: Callable[[tuple[int, int], Any], Array] = np.zeros,
    ) -> None:
        self._comm, self._add, self._type = comm, add, mpi_type(np.dtype(dtype))
        self._pieces = pieces_of(ranges)
        self.lo, self.hi = ranges[comm.rank]
        count, n = self.hi - self.lo, comm.size
        self._rows = allocate((n, count), dtype)
        self._received = [self._rows, ([count] * n, [count * rank for rank in range(n)]), self._type]
        width = np.dtype(dtype).itemsize
        self.bytes_scattered, self.bytes_shared = width * (sum(self._pieces[0]) - count), width * count * (n - 1)
        self.request = MPI.REQUEST_NULL

    def start(self, vector: Array) -> None:
        """Send every rank its range of ``vector``, which must not change until ``finish``."""
        self.request = self._comm.Ialltoallv(self.message(vector), self._received)

    def finish(self, out: Array) -> None:
        """Wait, and write the sum of this rank's range to ``out[lo:hi]``."""
        self.request.Wait()
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
