"""The ranks of a program that has called ``init``, and their process sets."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from ..backend.members import create_comm, split_by_node
from ..comm.mpi import MPI
from .channel import Channel
from .engine import Engine
from .request import Handle, Request
from .settings import Settings
from .timeline import Timeline

_FREE_S = 10.0  # maximum time for all ranks of a process set to remove it


class World:
    """The ranks. Construction is collective over ``comm``; so are all methods that are not marked as local.

    Args:
        comm: All ranks; the world owns it.

    Attributes:
        rank, size: This rank's number in ``comm``, and the number of ranks.
        local_rank, local_size: The same on this host.
        cross_rank, cross_size: The same among the ranks with the same local rank on all hosts.
        is_homogeneous: Whether every host has the same number of ranks.
        timeline: The timeline of the first rank.
        engine: Performs the operations.
        sets: The ranks of each process set, by its number.
    """

    def __init__(self, comm: MPI.Intracomm, settings: Settings) -> None:
        self._comm, self._settings, self.timeline = comm, settings, Timeline()
        self.rank, self.size = comm.rank, comm.size
        node = split_by_node(comm)
        self.local_rank, self.local_size = node.rank, node.size
        node.Free()
        places = comm.allgather((self.local_rank, self.local_size))
        self.cross_rank = [local for local, _ in places[: self.rank]].count(self.local_rank)
        self.cross_size = [local for local, _ in places].count(self.local_rank)
        self.is_homogeneous = len({size for _, size in places}) == 1
        everyone = list(range(self.size))
        self.sets = {0: everyone}
        self._next_set = 1
        channel = Channel(comm.Dup(), "all ranks", everyone, settings, self.timeline)
        self.engine = Engine(channel, settings.cycle_s)
        if settings.timeline and self.rank == 0:
            self.timeline.start(settings.timeline, settings.mark_cycles)

    def channel(self, process_set: int) -> Channel:
        """Return the channel of a process set. Local.

        Raises:
            ValueError: This rank does not belong to the set, or the set has been removed.
        """
        channel = self.engine.channels.get(process_set)
        if channel is None:
            raise ValueError(
                f"rank {self.rank} does not belong to process set {process_set}"
                if process_set in self.sets
                else "the process set has been removed; call add_process_set"
            )
        return channel

    @property
    def has_failed(self) -> bool:
        """Whether a rank has shut down or ended, so that no operation of all ranks is possible any more. Local."""
        return self.channel(0).submissions.error is not None

    def translate(self, comm: MPI.Comm) -> list[int]:
        """Return the ranks of another communicator as ranks of the world. Local."""
        theirs, ours = comm.Get_group(), self._comm.Get_group()
        ranks = MPI.Group.Translate_ranks(theirs, None, ours)
        theirs.Free()
        ours.Free()
        return sorted(ranks)

    def agree(self, kind: str, ranks: Sequence[int]) -> None:
        """Return when all ranks have called this with the same arguments; performed in order with the other operations.

        Raises:
            HorovodInternalError: The arguments differ, or a rank has shut down.
        """
        channel = self.channel(0)
        handle = channel.submissions.add(Handle(Request(kind, "process sets", shapes=(tuple(ranks),))))
        self.engine.wait(handle)
        if handle.error is not None:
            raise handle.error

    def add_set(self, ranks: Sequence[int]) -> int:
        """Add a process set, and return its number.

        Raises:
            ValueError: A rank does not exist or occurs twice, or there is such a set.
        """
        if not ranks or sorted(set(ranks)) != list(ranks) or ranks[0] < 0 or ranks[-1] >= self.size:
            raise ValueError(f"process set {list(ranks)}: give different ranks from 0 to {self.size - 1}")
        if list(ranks) in self.sets.values():
            raise ValueError(f"a process set with the ranks {list(ranks)} already exists")
        number, self._next_set = self._next_set, self._next_set + 1
        self.sets[number] = list(ranks)
        if self.rank in ranks:
            comm, name = create_comm(self._comm, ranks, number), f"process set {number}"
            self.engine.channels[number] = Channel(comm, name, ranks, self._settings, self.timeline)
        return number

    def remove_set(self, number: int) -> None:
        """Remove a process set."""
        self.sets.pop(number)
        channel = self.engine.release(number)
        if channel is not None:
            channel.free(perf_counter() + _FREE_S)

    def allgather(self, value: object) -> list[object]:
        """Return the values of all ranks. Must not be called while a process set is added."""
        return self._comm.allgather(value)

    def close(self) -> None:
        """Leave: pending operations of other ranks fail. Waits at most ten seconds for these ranks to leave. Local."""
        is_freed = self.engine.close()
        self.timeline.stop()
        if is_freed:
            self._comm.Free()


_world: World | None = None


def current() -> World:
    """Return the world. Local.

    Raises:
        ValueError: ``init`` has not been called.
    """
    if _world is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _world


def is_initialized() -> bool:
    """Return whether ``init`` has been called, and ``shutdown`` has not been called since. Local."""
    return _world is not None


def replace(world: World | None) -> None:
    """Set the world that ``current`` returns. Local."""
    global _world
    _world = world
