"""The common part of modes in which all workers take the same steps, each with its own batch."""

from __future__ import annotations

import math
import time
from typing import Any, SupportsFloat

from ..checkpoint.snapshot import Snapshot
from ..comm.mpi import MPI
from ..core.layout import Array
from ..monitor.trace import span
from ..plan.plan import Plan
from ..plan.progress import ConsistentPoint, ExtraState, Progress, WorkItem
from .base import PauseRequests, Stats, StepResult, non_finite_error

_WAIT = span("wait")

STOP = 1  # flag: a worker was asked to stop
PAUSE = 2  # flag: the chief has requested a consistent point


class BulkSynchronous:
    """Counts steps and examples; subclasses do the rest of ``base.Strategy``.

    A subclass sets ``params`` and ``grads``, and implements ``finish``, ``vector`` and ``close``. ``finish`` averages
    and updates, if ``_accept`` returns True, and calls ``_await_release`` before it changes a vector. It calls
    ``_count``, and calls ``_reach`` after each step at whose end all workers hold the same parameters, with the union
    of all workers' ``_flags``; the last step must be one of these. ``_loss`` is this worker's share of the step's mean
    loss: the sum of all workers' shares is the mean, and the sum of their gradients is its gradient.

    Args:
        workers: The communicator of the workers.
        step, data_cursor: Where training begins.

    Attributes:
        compute_s: Seconds that this worker has taken from ``next`` to ``begin``, to load batches and compute losses.
    """

    params: Array
    grads: Array
    _result = StepResult(math.nan, True)

    def __init__(self, plan: Plan, workers: MPI.Intracomm, step: int, data_cursor: int) -> None:
        self._plan = plan
        self.progress = Progress(step, data_cursor)
        self._examples, self._train_steps = plan.step_examples, plan.train_steps
        self._offset = workers.rank * plan.batch
        self._pauses = PauseRequests(workers)
        self._flags = 0  # of this worker
        self._loss: Any = math.nan  # this worker's share of the step's loss
        self._point: ConsistentPoint | None = None  # reached, and not yet returned by ``next``
        self._ended = False
        self._snapshot: Snapshot | None = None  # whose vectors must not change
        self._counted_to = step
        self._loss_sum, self._updated, self._skipped = 0.0, 0, 0
        self.compute_s, self._step_began = 0.0, 0.0
        if step >= plan.train_steps:
            self._reach(0)

    @property
    def result(self) -> StepResult:
        return self._result

    def next(self) -> WorkItem | ConsistentPoint | None:
        if self._point is not None:
            point, self._point = self._point, None
            return point
        if self._ended:
            return None
        self._step_began = time.perf_counter()
        return WorkItem(self.progress.step, self.progress.data_cursor + self._offset)

    def begin(self, loss: SupportsFloat) -> None:
        self._loss = loss
        self.compute_s += time.perf_counter() - self._step_began

    def ready(self, start: int) -> None:
        """Do nothing: the gradient is used as a whole."""

    def request_pause(self, reason: str) -> None:
        self._pauses.add(reason)
        self._flags |= PAUSE

    def request_stop(self) -> None:
        self._flags |= STOP

    def vector(self, name: str) -> Array:
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        self._await_release()
        vectors = {name: self.vector(name) for name in self._plan.vectors}
        self._snapshot = Snapshot(vectors, self.progress.step, self.progress.data_cursor, self._extra_state())
        return self._snapshot

    def stats(self) -> Stats:
        return Stats(self._counted_to, self._loss_sum, self._updated, self._skipped, [])

    def _extra_state(self) -> ExtraState:
        return {}

    def _await_release(self) -> None:
        """Wait until the vectors of the last snapshot may change; quick if nothing is being saved."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot = None

    def _accept(self, losses: Array) -> bool:
        """Return whether to update with a step's gradient, as ``--nan`` requests for a loss that is not finite.

        Args:
            losses: Every worker's share of the loss, shape (workers,), the same on all workers.

        Raises:
            NonFiniteLoss: A loss is not finite and ``--nan`` is ``stop``; on all workers.
        """
        nan, finite = self._plan.config.training.nan, math.isfinite(float(losses.sum()))
        if not finite and nan == "stop":
            raise non_finite_error(losses, self.progress.step, on_all_ranks=True)
        return finite or nan == "ignore"

    def _count(self, loss: float, updated: bool) -> None:
        """Count one step whose result is known."""
        self._advance()
        self._tally(loss, updated)

    def _advance(self) -> None:
        step, data_cursor, _ = self.progress
        if step >= self._train_steps:
            raise RuntimeError(f"{type(self).__name__}.finish did not call _reach at the last step, {step:,}")
        self.progress = Progress(step + 1, data_cursor + self._examples)

    def _tally(self, loss: float, updated: bool) -> None:
        self._result = StepResult(loss, updated)
        self._counted_to += 1
        if updated:
            self._loss_sum += loss
            self._updated += 1
        else:
            self._skipped += 1

    def _reach(self, flags: int) -> None:
        """Make this step a consistent point; ``flags`` is the union of all workers' flags."""
        step, data_cursor, _ = self.progress
        self._ended = bool(flags & STOP) or step >= self._train_steps
        reasons: frozenset[str] = frozenset()
        if flags & PAUSE:
            with _WAIT:
                reasons = self._pauses.take()
            self._flags &= ~PAUSE
        self._point = ConsistentPoint(step, data_cursor, reasons, self._ended)
