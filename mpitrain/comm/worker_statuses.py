"""The exchange of a number and flags of every worker: in shared memory on one node, by MPI on several nodes."""

from __future__ import annotations

import numpy as np

from ..core.layout import Array
from .hierarchy import Hierarchy
from .mpi import MPI


class WorkerStatuses:
    """The workers' numbers and flags of a step.

    A step calls ``post``, then a barrier of the node, and then ``collect``.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._barrier, self._comm = hierarchy.barrier, hierarchy.comm
        self._several_nodes = hierarchy.n_nodes > 1
        self._own, self._all = np.zeros(2), np.zeros((hierarchy.comm.size, 2))
        self._request = MPI.REQUEST_NULL

    def post(self, number: float, flags: int) -> None:
        """Set this worker's number and flags. Local; the others wait for it in ``collect``."""
        self._barrier.set_status(number, flags)
        if self._several_nodes:
            self._own[:] = number, flags
            self._request = self._comm.Iallgather(self._own, self._all)

    def progress(self) -> None:
        """Let MPI progress. Local."""
        self._request.Test()

    def collect(self) -> tuple[Array, list[int]]:
        """Return every worker's number and flags, in rank order. Collective over the workers."""
        if not self._several_nodes:
            return self._barrier.losses, self._barrier.flags
        self._request.Wait()
        return self._all[:, 0], self._all[:, 1].astype(np.int64).tolist()
