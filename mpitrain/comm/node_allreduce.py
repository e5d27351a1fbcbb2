"""Averaging a vector among the ranks of a node, in memory that they share.

Every rank's vector is a row of one shared array. Between two half barriers each rank sums its own part of
all rows, block by block, and writes the average where every rank reads it: nothing is sent, and nothing is
copied out. (A reduce-scatter by loads; its allgather is the cache's.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.kernels import kernel, sum_rows
from ..core.layout import ALIGN, Array
from .mpi import MPI
from .phase_barrier import Board
from .shared_memory import SharedArrays, row_stride

_BLOCK = 4096  # elements summed at a time: the sum of a block stays in the first-level cache


def part(start: int, stop: int, index: int, parts: int) -> tuple[int, int]:
    """The ``index``-th of ``parts`` nearly equal ranges of [start, stop), cut at cache lines."""
    lines = -(-(stop - start) // ALIGN)
    lo = start + lines * index // parts * ALIGN
    hi = start + lines * (index + 1) // parts * ALIGN
    return min(lo, stop), min(hi, stop)


@kernel
def sum_in_place(rows: Array, lo: int, hi: int, scale: float, row: int) -> None:
    """rows[row][lo:hi] = scale * (rows[0] + rows[1] + ...)[lo:hi], added in that order."""
    if len(rows) == 2:
        # Commutative, so the order is kept; and without a copy the vector passes through the core once.
        factor = rows.dtype.type(scale)
        total, other = rows[row, lo:hi], rows[1 - row, lo:hi]
        for i in range(total.size):
            total[i] = factor * (total[i] + other[i])
        return
    scratch, order = np.empty(_BLOCK, rows.dtype), np.arange(len(rows))
    for start in range(lo, hi, _BLOCK):
        stop = min(start + _BLOCK, hi)
        block, target = scratch[: stop - start], rows[row, start:stop]
        sum_rows(rows, order, start, stop, scale, block)
        for i in range(target.size):  # not target[:] = block, which compiles to a slow general copy
            target[i] = block[i]


class NodeAverage:
    """Averages vectors of one length among the ranks of a node.

    Construction and ``average`` are collective over ``node``.

    Attributes:
        own: This rank's vector, shape (size,): write it, then call ``average``.
    """

    def __init__(self, node: MPI.Intracomm, size: int, dtype: Any, cores: int) -> None:
        self._shared = SharedArrays(node)
        self._board = Board(self._shared, cores)
        self._rows = self._shared.allocate((node.size, row_stride(size)), dtype)
        self.own = self._rows[node.rank, :size]
        self._result = self._rows[0, :size]
        self._result.flags.writeable = False
        self._part = part(0, size, node.rank, node.size)
        self._phase = 0

    def average(self) -> Array:
        """The mean over all ranks, shape (size,), the same memory on every rank; read-only.

        It may be read until ``release``, which must come before ``own`` is written again.
        """
        lo, hi = self._part
        self._meet()
        sum_in_place(self._rows, lo, hi, 1.0 / len(self._rows), 0)
        self._meet()
        return self._result

    def release(self) -> None:
        """Wait until every rank is done with the result."""
        self._meet()

    def _meet(self) -> None:
        self._phase += 1
        self._board.publish(self._phase)
        self._board.wait(self._phase)

    def free(self) -> None:
        """Give the memory back; collective over the node."""
        self._shared.free()
