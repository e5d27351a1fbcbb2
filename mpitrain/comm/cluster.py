"""Who trains: the ranks, the nodes that they are on, and what each of them may use.

The only module that touches ``COMM_WORLD``: it is duplicated once, and everybody communicates over what
``Cluster`` hands out.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ..core.layout import Layout
from ..errors import RankMismatch, UserError
from ..plan.config import RunConfig
from ..plan.roles import server_ranks
from .mpi import MPI, start


class OtherRankFailed(Exception):
    """Another rank failed, and reports it itself."""


class Group:
    """Ranks that do something together, and fail together.

    Attributes:
        comm: The ranks.
        node: Those of them on this node, in the order of their ranks.
        self_comm: This rank only.
        host: This node's name.
        name_of_rank: This rank as messages name it.
        is_world: Whether these are all ranks of the run.
    """

    is_world = False

    def __init__(self, comm: MPI.Intracomm, node: MPI.Intracomm, host: str, rank_description: str) -> None:
        self.comm, self.node, self.host, self.rank_description = comm, node, host, rank_description
        self.self_comm = MPI.Intracomm(MPI.COMM_SELF)

    @contextmanager
    def agree(self, doing: str) -> Iterator[None]:
        """Run a block that may fail on one rank only, then fail on all ranks or on none.

        Collective over ``comm``; nothing inside the block may communicate.

        Raises:
            UserError: On every rank, of the type that the lowest failing rank raised, naming that rank where
                the others did not fail likewise.
            OtherRankFailed: Where another rank met an unforeseen exception; that rank raises it itself.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if not self.comm.allreduce(error is not None, op=MPI.LOR):
            return
        failures = self.comm.allgather(
            None if error is None else (isinstance(error, UserError), type(error), str(error))
        )
        unforeseen = [rank for rank, failure in enumerate(failures) if failure and not failure[0]]
        if unforeseen:
            if error is not None and self.comm.rank == unforeseen[0]:
                raise error
            raise OtherRankFailed(f"rank {unforeseen[0]} failed while {doing}")
        rank, (_, kind, message) = next((r, f) for r, f in enumerate(failures) if f)
        if any(failure != failures[rank] for failure in failures):
            message = f"{message} ({self._name_of(rank)})"
        agreed = kind(message)
        if not self.is_world and self.comm.rank > 0:
            raise OtherRankFailed(message)  # the group's first rank tells it, and ends those outside the group
        agreed.on_all_ranks = self.is_world
        raise agreed from error

    def any(self, mine: bool) -> bool:
        """Whether it is so on any rank; collective over ``comm``."""
        return self.comm.allreduce(mine, op=MPI.LOR)

    def _name_of(self, rank: int) -> str:
        """How messages name a rank of the group; collective over ``comm``."""
        return self.comm.bcast(self.rank_description, root=rank)

    def check_layout(self, layout: Layout) -> None:
        """Make sure that every rank has laid out the same parameters; collective over ``comm``.

        Raises:
            RankMismatch: Naming the ranks that differ from rank 0 and the first parameter that does.
        """
        digests = layout.digests()
        everyone = self.comm.allgather(digests.tobytes())
        differ = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
        if not differ:
            return
        at = 16 * next(
            (
                i
                for i in range(len(everyone[0]) // 16)
                if everyone[0][16 * i :][:16] != everyone[differ[0]][16 * i :][:16]
            ),
            len(everyone[0]) // 16,
        )
        mine = [(e.name, e.shape) for e in layout.entries]
        names = self.comm.allgather(mine[at // 16] if at // 16 < len(mine) else None)
        raise _mismatch(differ, "model", _parameter(names[0]), _parameter(names[differ[0]]))

    def check_same(self, facts: Mapping[str, object]) -> None:
        """Make sure that every rank was told the same; collective over ``comm``.

        Raises:
            RankMismatch: Naming the ranks that differ from rank 0 and the first fact that does.
        """
        everyone = self.comm.allgather({name: str(value) for name, value in facts.items()})
        for name, value in everyone[0].items():
            differ = [rank for rank, other in enumerate(everyone) if other[name] != value]
            if differ:
                raise _mismatch(differ, name, value, everyone[differ[0]][name])


class Cluster(Group):
    """All ranks of this run, and their roles.

    Construction is collective over ``COMM_WORLD``. Every rank is a worker until ``assign`` says otherwise.

    Attributes:
        rank, size: In ``comm``.
        servers: Ranks in ``comm`` of the parameter servers, by task index.
        worker_ranks: Ranks in ``comm`` of the workers, by task index.
        workers: The ranks that compute gradients; of a server, the servers.
        training: The workers as a group; of a server, the servers.
        node_of: For each rank, the lowest rank on its node.
        host_of: For each rank, its host's name.
        n_nodes: Nodes that the ranks are on.
        cores: Cores that this node's ranks may use together.

    Raises:
        LaunchError: The launcher started several ranks, and MPI sees one.
    """

    is_world = True

    def __init__(self) -> None:
        comm = start().Dup()
        node = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))
        host = socket.gethostname()
        super().__init__(comm, node, host, f"rank {comm.rank} of {comm.size}, on {host}")
        self.rank, self.size = comm.rank, comm.size
        places: list[tuple[int, str]] = comm.allgather((node.bcast(comm.rank, root=0), host))
        self.node_of, self.host_of = [leader for leader, _ in places], [name for _, name in places]
        self.n_nodes = len(set(self.node_of))
        self.cores = len(set().union(*node.allgather(os.sched_getaffinity(0))))
        self.servers: list[int] = []
        self.worker_ranks = list(range(comm.size))
        self.training: Group = self

    @property
    def workers(self) -> MPI.Intracomm:
        return self.training.comm

    def assign(self, config: RunConfig) -> None:
        """Give every rank its role; collective over ``comm``.

        Raises:
            ConfigError: On every rank: there are too few ranks for the roles, or none on a host that is named.
        """
        try:
            config.check_ranks(self.size)
            servers = server_ranks(self.node_of, self.host_of, config.ps, config.ps_placement, config.ps_hosts)
        except UserError as error:
            error.on_all_ranks = True
            raise
        if not servers:
            return
        self.servers = servers
        self.worker_ranks = [rank for rank in range(self.size) if rank not in servers]
        order = self.task_index
        self.training = Group(
            MPI.Intracomm(self.comm.Split(self.is_server, key=order)),
            MPI.Intracomm(self.node.Split(self.is_server, key=order)),
            self.host,
            f"{self.role} {order} ({self.rank_description})",
        )

    @property
    def is_server(self) -> bool:
        return self.rank in self.servers

    @property
    def role(self) -> str:
        """``ps`` or ``worker``."""
        return "ps" if self.is_server else "worker"

    @property
    def task_index(self) -> int:
        """This rank's number among those of its role."""
        return (self.servers if self.is_server else self.worker_ranks).index(self.rank)

    @property
    def chief(self) -> bool:
        """Whether this rank, the first worker, speaks and writes files for all."""
        return self.rank == self.chief_rank

    @property
    def chief_rank(self) -> int:
        """The first worker's rank in ``comm``."""
        return self.worker_ranks[0]

    @property
    def threads(self) -> int:
        """BLAS threads of this rank: the node's cores shared among its workers, at most those it is bound to."""
        here = [rank for rank in self.worker_ranks if self.node_of[rank] == self.node_of[self.rank]]
        return max(1, min(self.cores // max(1, len(here)), len(os.sched_getaffinity(0))))

    def table(self, device: str) -> list[tuple[str, ...]]:
        """Rank, host, role, task index and device of every rank; collective over ``comm``."""
        return self.comm.allgather((str(self.rank), self.host, self.role, str(self.task_index), device))

    def abort(self, status: int) -> None:
        """End every rank at once; local."""
        self.comm.Abort(status)


def _mismatch(ranks: list[int], what: str, first: str, other: str) -> RankMismatch:
    error = RankMismatch(
        f"rank{'s' * (len(ranks) > 1)} {_join(ranks)} and rank 0 do not have the same {what}: it is {first} on rank 0 "
        f"and {other} on rank {ranks[0]}; the job must be the same on every rank"
    )
    error.on_all_ranks = True
    return error


def _join(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _parameter(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "at its end" if entry is None else f"{entry[0]} {entry[1]}"


def report_crash(cluster: Cluster | None, error: BaseException) -> str:
    """One traceback, headed by the rank that it happened on."""
    where = "" if cluster is None else f"{cluster.rank_description}: "
    return f"mpitrain: {where}unforeseen {type(error).__name__}\n" + "".join(traceback.format_exception(error))
