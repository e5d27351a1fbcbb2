"""The ranks of a process group as MPI communicators, with the shared memory of each node."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..comm.hierarchy import Hierarchy
from ..comm.mpi import MPI, library_name, start
from ..comm.shared_memory import sharing_problem
from ..core.cpus import all_cores, usable_cores
from ..core.words import numbered
from ..errors import LaunchError
from . import process_end
from .staging import Staging, shared_bytes_per_rank

_LARGEST_TAG = 32767  # the MPI standard guarantees tags up to this value


@dataclass(frozen=True)
class Members:
    """A process group's ranks.

    Attributes:
        name: The group's name, as PyTorch generated it.
        comm: Communicator of all ranks, in the order of the group's ranks.
        messages: A second communicator, for messages between two ranks.
        headers: A communicator on which the first ranks of all nodes compare operations; None elsewhere and on one
            node.
        hierarchy: Communicators within and between nodes.
        staging: The memory through which the ranks of a node exchange tensors.
        node_of: For each rank, the index of its node.
        index_of: For each rank, its index on its node.
    """

    name: str
    comm: MPI.Intracomm
    messages: MPI.Intracomm
    headers: MPI.Intracomm | None
    hierarchy: Hierarchy
    staging: Staging
    node_of: list[int]
    index_of: list[int]

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def on_one_node(self) -> bool:
        return self.hierarchy.n_nodes == 1

    @property
    def node(self) -> int:
        """The index of this rank's node."""
        return self.node_of[self.rank]

    def ranks_of_node(self, node: int) -> list[int]:
        """Return the group's ranks on a node, by their index there."""
        return [rank for rank, on in enumerate(self.node_of) if on == node]

    def behind(self) -> list[int]:
        """Return the ranks of this node that have not published this rank's phase."""
        local = self.ranks_of_node(self.node)
        return [local[index] for index in self.staging.behind()]

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank of this node has left, or its process has ended; False for ranks of other nodes."""
        return self.node_of[rank] == self.node and self.staging.has_ended(self.index_of[rank])

    def free(self) -> None:
        """Free communicators and shared memory. Collective over ``comm``."""
        process_end.forget(self.staging)
        self.hierarchy.free()
        if self.hierarchy.node != MPI.COMM_SELF:
            self.hierarchy.node.Free()
        if self.headers is not None:
            self.headers.Free()
        self.messages.Free()
        self.comm.Free()


def split_by_node(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return the ranks of this node as a communicator. Collective over ``comm``."""
    return MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))


def start_with_threads(user: str) -> MPI.Intracomm:
    """Start MPI for calls by several threads, and return the world communicator. Collective over ``COMM_WORLD``.

    Args:
        user: The user of the threads, for the error message.

    Raises:
        LaunchError: MPI was not started by a launcher of its library, or was started with a lower thread level.
    """
    world = start()
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise LaunchError(
            f"{user} needs MPI_THREAD_MULTIPLE, but the program has started MPI with a lower "
            "thread level; remove mpi4py.rc.thread_level or the call of MPI.Init, or pass MPI.THREAD_MULTIPLE to "
            "MPI.Init_thread"
        )
    return world


def join(store: Any, rank: int, size: int, name: str, timeout: timedelta) -> Members:
    """Return the members of a new process group. Collective over its ranks only.

    Args:
        store: The group's store, through which the ranks exchange their numbers in MPI's world.
        rank, size: This rank's number in the group, and the number of its ranks.

    Raises:
        LaunchError: MPI was not started for these ranks, or does not allow calls by several threads.
    """
    world = start_with_threads("the backend mpitrain")
    world_ranks = _exchange_ranks(store, world, rank, size, timeout)
    return members_of(create_comm(world, world_ranks, zlib.crc32(name.encode())), name)


def create_comm(comm: MPI.Intracomm, ranks: Sequence[int], number: int = 0) -> MPI.Intracomm:
    """Return a communicator of some ranks of ``comm``. Collective over these ranks.

    Args:
        number: Distinguishes communicators that are created at the same time.
    """
    group = comm.Get_group()
    members = group.Incl(list(ranks))
    created = comm.Create_group(members, number % _LARGEST_TAG)
    members.Free()
    group.Free()
    return created


def members_of(comm: MPI.Intracomm, name: str) -> Members:
    """Return the ranks of a communicator, which the members own from now on. Collective over ``comm``."""
    node = split_by_node(comm)
    cores = all_cores(node.allgather(usable_cores()))
    problems = comm.allgather(sharing_problem(node, shared_bytes_per_rank(comm.size) * node.size))
    if any(problems):
        node = MPI.Intracomm(MPI.COMM_SELF)  # ranks that cannot share memory use messages, as if on separate nodes
    hierarchy = Hierarchy(comm, node, cores)
    leaders: list[int] = comm.allgather(node.bcast(comm.rank, root=0))
    order = sorted(set(leaders))
    node_of = [order.index(leader) for leader in leaders]
    index_of = [node_of[:rank].count(on) for rank, on in enumerate(node_of)]
    headers = None
    if hierarchy.internode is not None and hierarchy.n_nodes > 1 and node.rank == 0:
        headers = hierarchy.internode.Dup()
    staging = Staging(hierarchy)
    process_end.watch(staging)
    return Members(name, comm, comm.Dup(), headers, hierarchy, staging, node_of, index_of)


def _exchange_ranks(store: Any, world: MPI.Intracomm, rank: int, size: int, timeout: timedelta) -> list[int]:
    """Return the rank in MPI's world of each of the group's ranks."""
    keys = [f"mpitrain/{index}" for index in range(size)]
    store.set(keys[rank], f"{world.rank} {world.size} {library_name()}")
    try:
        store.wait(keys, timeout)
    except Exception as error:  # DistStoreError; in older releases of PyTorch RuntimeError
        absent = [index for index in range(size) if not store.check([keys[index]])]
        raise LaunchError(
            f"rank {rank} of {size} on {socket.gethostname()}: after {timeout.total_seconds():g} s, "
            f"{numbered('rank', absent)} had not called init_process_group or new_group"
        ) from error
    entries = [store.get(key).decode().split(" ", 2) for key in keys]
    world_ranks = [int(words[0]) for words in entries]
    if len(set(world_ranks)) < size or any(words[1:] != entries[0][1:] for words in entries):
        raise LaunchError(
            f"the {size} ranks of the process group are not ranks of one MPI program: MPI sees a world of size "
            f"{world.size}, {library_name()}; start the program with 'mpirun -n {size} python PROGRAM' or "
            "'srun --mpi=pmix', not with torchrun"
        )
    return world_ranks
