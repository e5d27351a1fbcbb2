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

from .errors import RankMismatch, UserError
from .mpi import MPI, start
from .params import Layout


class OtherRankFailed(Exception):
    """Another rank failed, and reports it itself."""


class Cluster:
    """The ranks of this run.

    Construction is collective over ``COMM_WORLD``.

    Attributes:
        comm: All ranks.
        workers: The ranks that compute gradients.
        node: The ranks on this node, in the order of their ranks.
        alone: This rank only.
        rank, size: In ``comm``.
        n_nodes: Nodes that the ranks are on.
        host: This node's name.
        cores: Cores that this node's ranks may use together.

    Raises:
        LaunchError: The launcher started several ranks, and MPI sees one.
    """

    def __init__(self) -> None:
        self.comm = start().Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.workers = self.comm
        self.node = MPI.Intracomm(self.comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank))
        self.alone = MPI.Intracomm(MPI.COMM_SELF)
        self.host = socket.gethostname()
        self.n_nodes = len(set(self.comm.allgather(self.node.bcast(self.rank, root=0))))
        self.cores = len(set().union(*self.node.allgather(os.sched_getaffinity(0))))

    @property
    def chief(self) -> bool:
        """Whether this rank speaks and writes files for all."""
        return self.rank == 0

    @property
    def threads(self) -> int:
        """BLAS threads of this rank: the node's cores shared among its ranks, at most those it is bound to."""
        return max(1, min(self.cores // self.node.size, len(os.sched_getaffinity(0))))

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
            if error is not None and self.rank == unforeseen[0]:
                raise error
            raise OtherRankFailed(f"rank {unforeseen[0]} failed while {doing}")
        rank, (_, kind, message) = next((r, f) for r, f in enumerate(failures) if f)
        if any(failure != failures[rank] for failure in failures):
            message = f"{message} (rank {rank} of {self.size}, on {self.comm_host(rank)})"
        agreed = kind(message)
        agreed.everywhere = True
        raise agreed from error

    def comm_host(self, rank: int) -> str:
        """Name of the host that ``rank`` is on; collective over ``comm``."""
        return self.comm.bcast(self.host, root=rank)

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

    @property
    def name_of_rank(self) -> str:
        """This rank as messages name it."""
        return f"rank {self.rank} of {self.size}, on {self.host}"

    def abort(self, status: int) -> None:
        """End every rank at once; local."""
        self.comm.Abort(status)


def _mismatch(ranks: list[int], what: str, first: str, other: str) -> RankMismatch:
    error = RankMismatch(
        f"rank{'s' * (len(ranks) > 1)} {_join(ranks)} and rank 0 do not have the same {what}: it is {first} on rank 0 "
        f"and {other} on rank {ranks[0]}; the job must be the same on every rank"
    )
    error.everywhere = True
    return error


def _join(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _parameter(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "at its end" if entry is None else f"{entry[0]} {entry[1]}"


def report_crash(cluster: Cluster | None, error: BaseException) -> str:
    """One traceback, headed by the rank that it happened on."""
    where = "" if cluster is None else f"{cluster.name_of_rank}: "
    return f"mpitrain: {where}unforeseen {type(error).__name__}\n" + "".join(traceback.format_exception(error))
