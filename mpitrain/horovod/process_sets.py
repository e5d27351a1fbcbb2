"""Process sets: subsets of the ranks, with separate operations."""

from __future__ import annotations

from collections.abc import Sequence

from ..comm.mpi import MPI
from . import world

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """A subset of the ranks. Every method is local.

    Args:
        ranks_or_comm: Ranks in any order, or a communicator of mpi4py.

    Attributes:
        process_set_id: The set's number; None until ``init`` or ``add_process_set`` has added the set.
        ranks: The ranks in ascending order; None for a communicator before ``init``.
        mpi_comm: The communicator, if it was given.

    Raises:
        ValueError: ``ranks_or_comm`` is neither ranks nor a communicator.
    """

    def __init__(self, ranks_or_comm: Sequence[int] | MPI.Comm) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: MPI.Comm | None = None
        if isinstance(ranks_or_comm, MPI.Comm):
            self.mpi_comm = ranks_or_comm
        elif isinstance(ranks_or_comm, (list, tuple, range)) and all(isinstance(rank, int) for rank in ranks_or_comm):
            self.ranks = sorted(ranks_or_comm)
        else:
            raise ValueError(f"ProcessSet takes a list of ranks or a communicator of mpi4py, not {ranks_or_comm!r}")

    def size(self) -> int | None:
        """Return the number of ranks; None if the set has not been added."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this rank's index in the set; None if the set has not been added or does not include this rank."""
        if self.process_set_id is None or self.ranks is None or not self.included():
            return None
        return self.ranks.index(world.current().rank)

    def included(self) -> bool | None:
        """Return whether this rank belongs to the set; None if the set's ranks are not known."""
        return None if self.ranks is None else world.current().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set, and return it. Collective over all ranks.

    Raises:
        ValueError: The ranks are not valid, or there is such a set already.
        HorovodInternalError: The ranks have called this function with different sets.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.ranks is None:
        raise NotImplementedError("a process set of a communicator can only be passed to init; give a list of ranks")
    world.current().agree("add_process_set", added.ranks)
    added.process_set_id = world.current().add_set(added.ranks)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, and return whether there was such a set. Collective over all ranks.

    Raises:
        HorovodInternalError: The ranks have called this function with different sets.
    """
    number = process_set.process_set_id
    if not number or process_set.ranks is None:
        return False
    world.current().agree("remove_process_set", process_set.ranks)
    world.current().remove_set(number)
    process_set.process_set_id = None
    return True


def take(process_sets: Sequence[ProcessSet]) -> None:
    """Add the process sets that ranks have passed to ``init``. Collective over all ranks.

    Ranks may pass different sets, if each passes the communicator that it belongs to.

    Raises:
        ValueError: A set occurs twice, or its ranks are not valid.
    """
    current = world.current()
    for process_set in process_sets:
        if process_set.mpi_comm is not None:
            process_set.ranks = current.translate(process_set.mpi_comm)
    passed = [process_set.ranks for process_set in process_sets]
    if any(passed.count(ranks) > 1 for ranks in passed) or current.sets[0] in passed:
        raise ValueError("the process sets of init must differ from each other and from the set of all ranks")
    numbers: dict[tuple[int, ...], int] = {}
    for of_rank in current.allgather(passed):
        for ranks in of_rank:  # type: ignore[attr-defined]
            if tuple(ranks) not in numbers:
                numbers[tuple(ranks)] = current.add_set(ranks)
    for process_set in process_sets:
        process_set.process_set_id = numbers[tuple(process_set.ranks or ())]
