"""What the workers of ``sync`` tell each other: how far each has got, its loss and flags, what its script does.

A worker's loss and flags, its *status*, are words of the barrier that the node's ranks read in place, without a copy.
No rank overwrites a status that another rank still reads::

    rank a   status, buckets | backward | reads all statuses | update | publish last phase | wait | status of k + 1
    rank b   status, buckets ........ | backward | reads all statuses | update | publish .. | wait | status of k + 1

A rank writes its status once in an average, before it publishes its first bucket. A rank publishes with a release store
and waits with acquire loads. A rank that has seen a phase of all other ranks can therefore read their statuses. A rank
reads the statuses between the bucket phases and a later phase, which it publishes after its last read. A rank writes
its next status only after it has seen that phase of all ranks, that is, after the last read of every rank. The same
phase lets a rank write its row again, and read the averages of the node. If a loss is not finite and training stops,
all ranks raise the error after the same reads and write no more. A nonblocking collective operation receives the
statuses of other nodes in a buffer of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from time import perf_counter

import numpy as np

from ..comm.hierarchy import Hierarchy
from ..comm.mpi import MPI
from ..core.layout import Array
from ..errors import JobError
from ..monitor.trace import span

CHANGE, UPDATE = 1, 2  # actions: a change of parameters by the script; an update, plus the number of its part
_FLAG_BITS = 8  # the other bits of a status's flags are a digest of the actions since the last exchange
_DIGESTS = 1 << 40
_WAIT = span("wait")


class Agreement:
    """The phases of a node's ranks, and the statuses of all workers.

    Args:
        progress: Lets MPI progress other operations between nodes; called while this rank waits.

    Attributes:
        has_posted: Whether this worker has posted a status that it has not collected.
    """

    def __init__(self, hierarchy: Hierarchy, progress: Callable[[], object]) -> None:
        self._barrier, self._comm = hierarchy.barrier, hierarchy.comm
        self._has_nodes, self._progress_others = hierarchy.n_nodes > 1, progress
        self._own, self._all = np.zeros(2), np.zeros((hierarchy.comm.size, 2))
        self._request, self.has_posted = MPI.REQUEST_NULL, False
        self._actions = 0  # digest of the actions since the last exchange of statuses

    def publish(self) -> None:
        """Announce that others may read what this rank has written, and overwrite what it has read. Local."""
        self._barrier.advance()

    def wait(self, phase: int | None = None) -> None:
        """Wait until all ranks of the node have published a phase, by default the last phase of this rank."""
        phase = self._barrier.phase if phase is None else phase
        if not self._barrier.reached(phase):
            with _WAIT:
                self._barrier.wait(phase, self.progress if self._has_nodes else None)

    def node_barrier(self) -> None:
        """Wait until all ranks of the node call this method."""
        self.publish()
        self.wait()

    def progress(self) -> None:
        """Let MPI progress the pending operations between nodes. Local."""
        self._request.Test()
        self._progress_others()

    def meet(self, action: int) -> None:
        """Wait until all ranks of the node begin the same action.

        Raises:
            JobError: Another rank of the node does something else.
        """
        self._actions = (self._actions * 31 + action) % _DIGESTS
        self._barrier.announce(action)
        self.wait()
        if not self._barrier.agree():
            raise _other_action(on_all_ranks=False)

    def post(self, loss: float, flags: int) -> None:
        """Set this worker's loss, its flags, and the digest of its actions; others see them with the next phase. Local.

        Args:
            flags: Less than 256.
        """
        self.has_posted, flags = True, flags | self._actions << _FLAG_BITS
        self._barrier.set_status(loss, flags)
        if self._has_nodes:
            self._own[:] = loss, flags
            self._request = self._comm.Iallgather(self._own, self._all)

    def collect(self) -> tuple[Array, int]:
        """Return every worker's loss, in rank order, and the union of all flags. Collective over the workers.

        All ranks of the node must have published a phase after ``post``. The losses are valid until the next phase.

        Raises:
            JobError: The workers have begun different actions since the last exchange; on all workers.
        """
        losses, all_flags = self._barrier.losses, self._barrier.flags
        if self._has_nodes:
            began = perf_counter()
            self._request.Wait()
            self._barrier.waited_s += perf_counter() - began
            losses, all_flags = self._all[:, 0], self._all[:, 1].astype(np.int64).tolist()
        self.has_posted, self._actions = False, 0
        if any(flags >> _FLAG_BITS != all_flags[0] >> _FLAG_BITS for flags in all_flags):
            raise _other_action(on_all_ranks=True)
        return losses, reduce(or_, all_flags) & ((1 << _FLAG_BITS) - 1)


def _other_action(on_all_ranks: bool) -> JobError:
    return JobError(
        "the workers do different things in a step: all workers must call backward, step (for the same optimizers in "
        "the same order) and change_parameters in the same steps",
        on_all_ranks=on_all_ranks,
    )
