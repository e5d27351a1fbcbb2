"""The interface between the training loop and every mode: work items, consistent points, parameters and gradients."""

from __future__ import annotations

from typing import NamedTuple, Protocol, SupportsFloat

import numpy as np

from ..checkpoint.snapshot import Snapshot
from ..comm.mpi import MPI
from ..core.layout import Array
from ..errors import NonFiniteLoss
from ..monitor.worker_stats import WorkerStats
from ..plan.progress import ConsistentPoint, Progress, WorkItem


class StepResult(NamedTuple):
    """The result of a step for this worker.

    Attributes:
        loss: Mean loss over the step's examples, as known to this worker.
        updated: False if the gradient was discarded because it was not finite or came too late.
    """

    loss: float
    updated: bool


class PauseRequests:
    """The consistent points that the chief has requested and that were not reached yet.

    Args:
        workers: The communicator of the workers; the chief is its first rank.
    """

    def __init__(self, workers: MPI.Intracomm) -> None:
        self._workers = workers
        self._reasons: set[str] = set()

    def __bool__(self) -> bool:
        """Return whether this worker has requested a point that was not reached yet. Local."""
        return bool(self._reasons)

    def add(self, reason: str) -> None:
        """Request a point. Local; chief only."""
        self._reasons.add(reason)

    def take(self) -> frozenset[str]:
        """Return the reasons for the point that all workers have reached. Collective over the workers."""
        reasons = frozenset(self._reasons)
        self._reasons.clear()
        return self._workers.bcast(reasons, root=0)  # type: ignore[no-any-return]


class Stats(NamedTuple):
    """Totals over all workers since this run began.

    Attributes:
        step: Number of completed steps that they cover, including those before a resume.
        loss: Sum of the losses of steps.
        steps: Number of steps in that sum.
        skipped: Number of steps skipped because their loss was not finite.
        workers: Statistics of each worker; empty if all workers take the same steps.
    """

    step: int
    loss: float
    steps: int
    skipped: int
    workers: list[WorkerStats]


class Strategy(Protocol):
    """Turns this worker's gradient of a step into the parameters of the next one.

    Constructed with ``(cluster, plan, devices, initial_state)``, collectively over the workers; in the served modes
    over all ranks. ``bulk_synchronous.BulkSynchronous`` is a base class for modes in which all workers take the same
    steps.

    Attributes:
        params: Shape (layout.size,): the parameters that the model computes with; read-only. On the worker's device or
            in host memory.
        grads: Shape (layout.size,): written by the model's backward pass; where ``params`` is.
    """

    params: Array
    grads: Array

    @property
    def progress(self) -> Progress:
        """How far training has come. Local."""

    @property
    def result(self) -> StepResult:
        """The result of the last step; waits for it if it is still being computed. Local."""

    def next(self) -> WorkItem | ConsistentPoint | None:
        """Return what to do next; None at the end, after the last ``ConsistentPoint``. May wait for other workers."""

    def begin(self, loss: SupportsFloat) -> None:
        """Set this worker's share of the step's loss, as the model's ``forward`` returns it. Local."""

    def ready(self, start: int) -> None:
        """Declare ``grads[start:]`` final; called with decreasing ``start``, finally 0. Local.

        The strategy may change parameters from now on, but only after it has checked that the loss is finite.

        Raises:
            NonFiniteLoss: The loss is not finite and ``--nan`` is ``stop``; here or in ``finish``.
        """

    def finish(self) -> None:
        """Submit the gradient. Collective over the workers if they take the same steps, else local."""

    def request_pause(self, reason: str) -> None:
        """Request a ``ConsistentPoint`` as soon as possible; its ``reasons`` include this one. Local; chief only."""

    def request_stop(self) -> None:
        """Ask all workers to stop soon. Local; one rank is enough."""

    def vector(self, name: str) -> Array:
        """Return one of ``plan.vectors``, complete, where ``params`` is; valid until the next call or step.

        Collective over the workers, at a ``ConsistentPoint``.
        """

    def snapshot(self) -> Snapshot:
        """Return the state for a checkpoint. Collective over the workers, at a ``ConsistentPoint``.

        The vectors are complete on the ranks that write: the chief, and if all workers take the same steps the first
        rank of each node. The strategy changes none of them before ``Snapshot.release`` is called.
        """

    def stats(self) -> Stats:
        """Return the totals of all workers; on the chief. Local."""

    def close(self) -> None:
        """Free memory. Collective over the ranks that constructed it."""


def non_finite_error(losses: Array, step: int, on_all_ranks: bool = False) -> NonFiniteLoss:
    """Return the error that names the workers whose loss is not finite.

    Args:
        losses: Shape (workers,). If all are finite, their sum is not.
        on_all_ranks: Whether all workers have all losses, and so raise the same error.
    """
    found = np.flatnonzero(~np.isfinite(losses))
    ranks = [str(rank) for rank in (found if len(found) else range(len(losses)))]
    worker = f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(ranks[:8])}{' ...' * (len(ranks) > 8)}"
    error = NonFiniteLoss(
        f"the loss is {losses[int(ranks[0])]} at step {step + 1:,} on {worker}; "
        "check that the examples are finite, lower the learning rate, clip the gradient, or pass --nan skip or --nan "
        "ignore to continue"
    )
    error.on_all_ranks = on_all_ranks
    return error


def own_loss_error(loss: float, worker: int, workers: int, step: int) -> NonFiniteLoss:
    """Return the error of a worker that has only its own loss, which is not finite."""
    losses = np.zeros(workers)
    losses[worker] = loss
    return non_finite_error(losses, step)
