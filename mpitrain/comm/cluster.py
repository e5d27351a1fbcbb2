"""The ranks of a run: their nodes, their roles and their communicators.

``Cluster`` duplicates ``COMM_WORLD`` once; all code that has a cluster communicates over the communicators of
``Cluster``.
"""

from __future__ import annotations

import socket
import sysconfig
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..core import activity
from ..core.cpus import Binding, all_cores, crowd_warnings, share_of, usable_cores
from ..core.layout import Layout
from ..core.words import numbered
from ..errors import RankMismatch, UserError
from ..plan.config import RunConfig
from ..plan.roles import server_ranks
from .mpi import MPI, start


class OtherRankFailed(Exception):
    """Another rank failed, and reports the error itself."""


class Group:
    """Ranks that work together and fail together.

    Attributes:
        comm: Communicator of the ranks.
        node: Communicator of the group's ranks on this node, in the order of their ranks.
        self_comm: Communicator of this rank only.
        host: This node's name.
        rank_description: This rank's name in messages.
        is_world: Whether the group has all ranks of the run.
    """

    is_world = False

    def __init__(self, comm: MPI.Intracomm, node: MPI.Intracomm, host: str, rank_description: str) -> None:
        self.comm, self.node, self.host, self.rank_description = comm, node, host, rank_description
        self.self_comm = MPI.Intracomm(MPI.COMM_SELF)

    @contextmanager
    def agree(self, doing: str) -> Iterator[None]:
        """Run a block that may fail on one rank only, and make it fail on all ranks or on none.

        Collective over ``comm``; the block itself must not communicate.

        Raises:
            UserError: On every rank if the group has all ranks of the run, else on the group's first rank. Type and
                message are those of the lowest failing rank, whose name is added unless all ranks failed alike.
            OtherRankFailed: On the other ranks; or if another rank has an unexpected exception, which that rank raises.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        with activity.waiting():
            failed = self.comm.allreduce(error is not None, op=MPI.LOR)
        if not failed:
            return
        failures = self.comm.allgather(
            None if error is None else (isinstance(error, UserError), type(error), str(error))
        )
        unexpected = [rank for rank, failure in enumerate(failures) if failure and not failure[0]]
        if unexpected:
            if error is not None and self.comm.rank == unexpected[0]:
                raise error
            raise OtherRankFailed(f"rank {unexpected[0]} failed while {doing}")
        rank, (_, kind, message) = next((r, f) for r, f in enumerate(failures) if f)
        if any(failure != failures[rank] for failure in failures):
            message = f"{message} ({self._name_of(rank)})"
        agreed = kind(message)
        if not self.is_world and self.comm.rank > 0:
            # The group's first rank reports the error, and ends the ranks outside the group.
            raise OtherRankFailed(message)
        agreed.on_all_ranks = self.is_world
        raise agreed from error

    def alone(self) -> Group:
        """Return a group of this rank only. Local."""
        return Group(self.self_comm, self.self_comm, self.host, self.rank_description)

    def any(self, value: bool) -> bool:
        """Return whether ``value`` is True on any rank. Collective over ``comm``."""
        with activity.waiting():
            return self.comm.allreduce(value, op=MPI.LOR)

    def _name_of(self, rank: int) -> str:
        """Return the name of a rank in messages. Collective over ``comm``."""
        return self.comm.bcast(self.rank_description, root=rank)

    def check_layout(self, layout: Layout) -> None:
        """Check that every rank has the same parameter layout. Collective over ``comm``.

        Raises:
            RankMismatch: Some ranks differ from rank 0; the message names them, and the first parameter that differs.
        """
        digests = layout.digests()
        all_digests = self.comm.allgather(digests.tobytes())
        differ = [rank for rank, other in enumerate(all_digests) if other != all_digests[0]]
        if not differ:
            return
        at = 16 * next(
            (
                i
                for i in range(len(all_digests[0]) // 16)
                if all_digests[0][16 * i :][:16] != all_digests[differ[0]][16 * i :][:16]
            ),
            len(all_digests[0]) // 16,
        )
        parameters = [(e.name, e.shape) for e in layout.entries]
        names = self.comm.allgather(parameters[at // 16] if at // 16 < len(parameters) else None)
        raise _mismatch(differ, "model", _parameter(names[0]), _parameter(names[differ[0]]))

    def check_same(self, facts: Mapping[str, object]) -> None:
        """Check that these named values are equal on all ranks. Collective over ``comm``.

        Raises:
            RankMismatch: Some ranks differ from rank 0; the message names them, and the first value that differs.
        """
        all_facts = self.comm.allgather({name: str(value) for name, value in facts.items()})
        for name, value in all_facts[0].items():
            differ = [rank for rank, other in enumerate(all_facts) if other[name] != value]
            if differ:
                raise _mismatch(differ, name, value, all_facts[differ[0]][name])


class Cluster(Group):
    """All ranks of this run, and their roles.

    Construction is collective over ``COMM_WORLD``. Every rank is a worker until ``assign`` changes its role.

    Attributes:
        rank, size: This rank's number in ``comm``, and the number of ranks.
        servers: Ranks in ``comm`` of the parameter servers, by task index.
        worker_ranks: Ranks in ``comm`` of the workers, by task index.
        workers: Communicator of the ranks that compute gradients; on a server, of the servers.
        training: The workers as a group; on a server, the servers.
        node_of: For each rank, the lowest rank on its node.
        host_of: For each rank, its host's name.
        n_nodes: Number of nodes.
        cores: Number of cores available to this node's ranks.

    Raises:
        LaunchError: The launcher started several ranks, but MPI sees only one.
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
        self.cores = all_cores(node.allgather(usable_cores()))
        self.servers: list[int] = []
        self.worker_ranks = list(range(comm.size))
        self.training: Group = self

    @property
    def workers(self) -> MPI.Intracomm:
        return self.training.comm

    def assign(self, config: RunConfig) -> None:
        """Assign a role to every rank. Collective over ``comm``.

        Raises:
            ConfigError: On every rank: there are too few ranks for the roles, or none on a requested host.
        """
        try:
            config.check_ranks(self.size)
            servers = server_ranks(
                self.node_of, self.host_of, config.servers.ps, config.servers.ps_placement, config.servers.ps_hosts
            )
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
        """This rank's index among the ranks of its role."""
        return (self.servers if self.is_server else self.worker_ranks).index(self.rank)

    @property
    def chief(self) -> bool:
        """Whether this rank is the first worker, which prints and writes files."""
        return self.rank == self.chief_rank

    @property
    def chief_rank(self) -> int:
        """The first worker's rank in ``comm``."""
        return self.worker_ranks[0]

    @property
    def threads(self) -> int:
        """BLAS threads per rank: the node's cores divided by its workers, at most the cores the rank is bound to."""
        local_workers = [rank for rank in self.worker_ranks if self.node_of[rank] == self.node_of[self.rank]]
        return share_of(self.cores, len(local_workers), usable_cores())

    def table(self, device: str) -> tuple[list[tuple[str, ...]], list[str]]:
        """Return rank, host, role, task index, device and binding of every rank, and warnings. Collective."""
        own = (str(self.rank), self.host, self.role, str(self.task_index), device)
        rows, bindings = zip(*self.comm.allgather((own, Binding.own())), strict=True)
        warnings = crowd_warnings([row[1] for row in rows], bindings)
        return [(*row, *binding.columns()) for row, binding in zip(rows, bindings, strict=True)], warnings

    def abort(self, status: int) -> None:
        """End every rank. Local."""
        time.sleep(0.1)  # launchers may drop what a rank has printed just before it aborts
        self.comm.Abort(status)


def _mismatch(ranks: list[int], what: str, first: str, other: str) -> RankMismatch:
    error = RankMismatch(
        f"{numbered('rank', ranks)} and rank 0 differ in {what}: {first} on rank 0, "
        f"{other} on rank {ranks[0]}; the job must be the same on every rank: seed its random numbers"
    )
    error.on_all_ranks = True
    return error


def _parameter(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "no further parameter" if entry is None else f"{entry[0]} {entry[1]}"


def report_crash(cluster: Cluster | None, error: BaseException) -> str:
    """Return the traceback of an error, headed by the name of the rank that raised it.

    If the user's code is in the traceback, such as a hook's, the frames that called it are omitted.
    """
    where = "" if cluster is None else f"{cluster.rank_description}: "
    users = error.__traceback__
    while users is not None and _is_library(users.tb_frame.f_code.co_filename):
        users = users.tb_next
    lines = traceback.format_exception(type(error), error, users or error.__traceback__)
    return f"mpitrain: {where}unexpected {type(error).__name__}\n" + "".join(lines)


def _is_library(file: str) -> bool:
    """Return whether a source file belongs to this package, to an installed package, or to Python."""
    folders = [str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))]
    return file.startswith("<") or any(Path(file).is_relative_to(folder) for folder in folders)
