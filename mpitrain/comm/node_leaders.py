"""The first rank of every node, and what these learn of each other without waiting for it."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from .backoff import Backoff
from .cluster import Group
from .mpi import MPI

T = TypeVar("T")


class NodeLeaders:
    """The first ranks of a group's nodes. Construction is collective over the group, the rest over the leaders.

    Attributes:
        member: Whether this rank is one; only then may anything else be called.
        rank, size: Of this rank among them, in the order of the group's ranks.
        comm: Theirs, which nobody else has.
    """

    def __init__(self, group: Group) -> None:
        self.member = group.node.rank == 0
        self.comm = MPI.Intracomm(group.comm.Split(0 if self.member else MPI.UNDEFINED, key=group.comm.rank))
        self.rank, self.size = (self.comm.rank, self.comm.size) if self.member else (-1, 0)
        self._mine, self._highest = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._reduction: MPI.Request | None = None

    @property
    def in_threads(self) -> bool:
        """Whether any thread of this rank may call MPI, while others do; local."""
        return MPI.Query_thread() == MPI.THREAD_MULTIPLE

    @property
    def pending(self) -> bool:
        """Whether ``start_max`` was called, and its answer is not known yet; local."""
        return self._reduction is not None

    def start_max(self, number: int) -> None:
        """Tell a number, not negative, and begin to learn of the highest that any leader tells; returns at once."""
        self._mine[0] = number * self.size + self.rank
        self._reduction = self.comm.Iallreduce(self._mine, self._highest, op=MPI.MAX)

    def test(self, wait: bool = False) -> bool:
        """Whether all leaders have asked; local unless it is to ``wait`` for that."""
        assert self._reduction is not None
        if wait:
            self._reduction.Wait()
        elif not self._reduction.Test():
            return False
        self._reduction = None
        return True

    @property
    def result(self) -> tuple[int, int]:
        """What ``start_max`` was answered: the highest number, and the rank of the leader that told it; local."""
        number, rank = divmod(int(self._highest[0]), self.size)
        return number, rank

    def agree(self, number: int) -> tuple[int, int]:
        """The highest number, not negative, that any leader tells, and its rank; keeps no core busy until all have."""
        self.start_max(number)
        Backoff(oversubscribed=True, yield_s=0).until(lambda times: self.test())
        return self.result

    def gather(self, mine: T) -> list[T]:
        """What every leader gives, in the order of their ranks."""
        return self.comm.allgather(mine)

    def free(self) -> None:
        """Give the communicator back."""
        self.comm.Free()
