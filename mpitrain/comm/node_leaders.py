"""The first rank of every node, and nonblocking communication between them."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from .backoff import Backoff
from .cluster import Group
from .mpi import MPI

T = TypeVar("T")


class NodeLeaders:
    """The first ranks of a group's nodes.

    Construction is collective over the group; all other methods are collective over the leaders, unless stated.

    Attributes:
        member: Whether this rank is a leader; a rank that is not a leader may use only this attribute.
        rank, size: This rank's number among the leaders, in the order of the group's ranks, and the number of leaders.
    """

    def __init__(self, group: Group) -> None:
        self.member = group.node.rank == 0
        self._comm = MPI.Intracomm(group.comm.Split(0 if self.member else MPI.UNDEFINED, key=group.comm.rank))
        self.rank, self.size = (self._comm.rank, self._comm.size) if self.member else (-1, 0)
        self._mine, self._highest = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._reduction: MPI.Request | None = None

    @property
    def in_threads(self) -> bool:
        """Whether several threads of this rank may call MPI at the same time. Local."""
        return MPI.Query_thread() == MPI.THREAD_MULTIPLE

    @property
    def pending(self) -> bool:
        """Whether ``start_max`` was called and its result is not known yet. Local."""
        return self._reduction is not None

    def start_max(self, number: int) -> None:
        """Start a maximum over all leaders' ``number`` >= 0. Returns immediately."""
        self._mine[0] = number * self.size + self.rank
        self._reduction = self._comm.Iallreduce(self._mine, self._highest, op=MPI.MAX)

    def test(self, wait: bool = False) -> bool:
        """Return whether all leaders have called ``start_max``. Local, unless ``wait`` is True: then, wait for them."""
        assert self._reduction is not None
        if wait:
            self._reduction.Wait()
        elif not self._reduction.Test():
            return False
        self._reduction = None
        return True

    @property
    def result(self) -> tuple[int, int]:
        """The maximum that ``start_max`` has found, and the rank of the leader that has it. Local."""
        number, rank = divmod(int(self._highest[0]), self.size)
        return number, rank

    def agree(self, number: int) -> tuple[int, int]:
        """Return the maximum of all leaders' ``number`` >= 0, and the rank that has it; sleeps while waiting."""
        self.start_max(number)
        Backoff(oversubscribed=True, yield_s=0).until(lambda times: self.test())
        return self.result

    def gather(self, value: T) -> list[T]:
        """Return every leader's value, in the order of their ranks."""
        return self._comm.allgather(value)

    def free(self) -> None:
        """Free the communicator."""
        self._comm.Free()
