"""The methods that all workers of a script call together."""

from __future__ import annotations

import functools
import logging
import math
import operator
import time
from typing import Any

from ..errors import JobError
from ..monitor.trace import span
from ..training.script_rank import ScriptRank

_WAIT = span("wait")
_POLL_S = 0.001
_WARNING_S = 10.0
_log = logging.getLogger(__name__)


class Collectives:
    """Collective methods of a script's workers: call them on all workers, not inside ``if trainer.rank == 0``.

    Args:
        rank: This rank, whose role is assigned before a method is called.
        limit_s: Number of seconds that a method waits for the other workers.
    """

    def __init__(self, rank: ScriptRank, limit_s: float) -> None:
        self._rank, self._limit_s = rank, limit_s

    def mean(self, value: Any) -> Any:
        """Return the mean over the workers; see ``sum`` for the types. Collective over the workers."""
        total, count = self._sum(value)
        return total / count

    def sum(self, value: Any) -> Any:
        """Return the sum over the workers; tensors are added in the order of the ranks. Collective over the workers.

        Args:
            value: A number, or a tensor.

        Returns:
            A float for a number or a tensor with one element; else a tensor on the CPU, of the same shape.
        """
        return self._sum(value)[0]

    def _sum(self, value: Any) -> tuple[Any, int]:
        """Return the sum, and the number of summands."""
        if getattr(value, "numel", lambda: 1)() == 1:
            numbers = self.gather(float(value.detach() if hasattr(value, "detach") else value))
            return math.fsum(numbers), len(numbers)
        values = self.gather(value)
        return functools.reduce(operator.add, values), len(values)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers, in rank order; tensors are on the CPU. Collective over the workers.

        Args:
            value: A number, a string, a tensor on any device, or any other object that can be pickled.
        """
        return self._gather_of_ranks(value)

    def _gather_of_ranks(self, value: Any) -> list[Any]:
        """Return the values of all ranks, as ``gather`` without virtual workers does. Collective over the workers."""
        self._wait_for_workers("mean, sum or gather of the Trainer")
        with _WAIT:
            on_host = value.detach().cpu() if hasattr(value, "detach") else value
            return self._rank.cluster.workers.allgather(on_host)

    def barrier(self) -> None:
        """Wait until all workers call this; after ``hang_timeout`` seconds, if it is given, end the run with an error.

        Collective over the workers.
        """
        self._wait_for_workers("barrier of the Trainer")

    def _wait_for_workers(self, method: str) -> None:
        """Wait until all workers have called a method. Collective over them.

        Args:
            method: The method's name, for the error.
        """
        workers = self._rank.cluster.workers
        with self._rank.errors_end_the_run():
            if wait_for_all(workers, self._limit_s, method):
                _check_same(workers, method)
            else:
                raise JobError(
                    f"{method} was called, but not by all workers within --hang-timeout {self._limit_s:g}: call it on "
                    "all of them, not inside 'if trainer.rank == 0'"
                )


def _check_same(workers: Any, method: str) -> None:
    """Check that all workers have called the same method. Collective over them.

    Raises:
        JobError: On all workers: they have called different methods.
    """
    with _WAIT:
        methods = workers.allgather(method)
    differing = next((other for other in range(workers.size) if methods[other] != methods[0]), None)
    if differing is not None:
        raise JobError(
            f"worker 0 has called {methods[0]}, but worker {differing} {methods[differing]}: all "
            f"workers must call the same methods in the same order, not inside 'if trainer.rank == 0'",
            on_all_ranks=True,
        )


def share(rank: ScriptRank, of_chief: Any) -> Any:
    """Return the chief's value. Collective over all ranks; servers wait for it without using a core."""
    wait_for_all(rank.cluster.comm)
    with _WAIT:
        return rank.cluster.comm.bcast(of_chief, root=rank.cluster.chief_rank)


def wait_for_all(comm: Any, limit_s: float = math.inf, method: str = "") -> bool:
    """Wait until all ranks of an MPI communicator have called this.

    Args:
        limit_s: Maximum number of seconds to wait.
        method: The method that the script has called, for a warning during a long wait; empty if it has called nothing.

    Returns:
        Whether all ranks have called this within ``limit_s``.
    """
    began, warns_at_s = time.monotonic(), _WARNING_S if method else math.inf
    with _WAIT:
        barrier = comm.Ibarrier()
        while not barrier.Test():
            waited_s = time.monotonic() - began
            if waited_s > limit_s:
                return False
            if waited_s > warns_at_s:
                warns_at_s = math.inf
                _log.warning(
                    "rank %d has called %s, and has waited %.0f s for the other workers: call it on all of them, not "
                    "inside 'if trainer.rank == 0'",
                    comm.rank,
                    method,
                    waited_s,
                )
            if waited_s > _POLL_S:
                time.sleep(_POLL_S)
    return True
