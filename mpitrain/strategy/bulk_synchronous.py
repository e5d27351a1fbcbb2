"""The common part of modes in which all workers take the same steps, each with its own batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from ..checkpoint.snapshot import Snapshot
from ..comm.cluster import Cluster
from ..core.extra_state import ExtraState, Versioned, values_of
from ..core.layout import Array
from ..monitor.trace import span
from ..optim.updater import Updater
from ..plan.plan import Plan
from ..plan.progress import ConsistentPoint, Progress, WorkItem
from .base import PauseRequests, Stats, StepResult, Strategy
from .non_finite import NonFinitePolicy
from .tensor_updates import TensorUpdates

_WAIT = span("wait")

STOP = 1  # flag: a worker was asked to stop
PAUSE = 2  # flag: the chief has requested a consistent point
_NAMESPACE = "updates"  # namespace of the extra state
_NO_REASONS: frozenset[str] = frozenset()


class BulkSynchronous(Strategy):
    """Counts steps and examples; subclasses do the rest of ``base.Strategy``.

    A subclass sets ``params``, ``grads`` and ``initial_vectors``, and implements ``vector``, ``close``, and either
    ``finish`` or ``average``, ``update`` and ``end_step``. These average the gradients, update if ``accept`` returns
    True, and call ``count``; ``await_release`` comes before a vector changes. They call ``enter_consistent_point`` with
    the union of all workers' ``flags`` after each step that ends with the same model on all workers, and after the last
    step.

    Attributes:
        loss: This worker's share of the step's mean loss. The sum of all workers' shares is the mean loss, and the sum
            of the workers' gradients is the gradient of the mean loss.
        flags: The requests of this worker, as bits, to be combined with the other workers' bits.
        non_finite: The policy for losses that are not finite.
        tensors: Updates by an optimizer that needs whole tensors, else None.
        grad_norm: The norm of the averaged gradient in the last step for which it was requested; None if that step made
            no update.
        measures_norm: Whether this step sets ``grad_norm``, because the norm will be reported.
        step_offset: Number of updates minus number of steps: scripts may have steps without an update.
    """

    synchronous = True
    step_offset = 0
    tensors: TensorUpdates | None = None
    _updater: Updater  # if ``move_to`` can be called

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.plan = plan
        self._examples = plan.step_examples
        self._share = plan.share_of(cluster.workers.rank)
        self._pauses = PauseRequests(cluster.workers)
        self.non_finite = NonFinitePolicy(plan.config.training.nan, plan.workers)
        self.progress = Progress(0, 0)
        self.flags = 0
        self.loss: Any = math.nan
        # The consistent point that was reached but not yet returned by ``next``.
        self._point: ConsistentPoint | None = None
        # Whether the chief requested this point; whether it is the last one.
        self._is_requested = self.has_ended = False
        self._snapshot: Snapshot | None = None  # the snapshot whose vectors must not change
        self._counted_to, self._loss_sum, self._updated, self._skipped = 0, 0.0, 0, 0
        self._moved = 0  # steps by which ``move_to`` has advanced
        output = plan.config.output
        self.grad_norm: float | None = None
        self.measures_norm = False
        self._norm_steps = output.log_steps if output.log_grad_norm else 0  # steps between two measurements; 0: never
        self._norm_at = 0  # the step before this one; ``move_to`` leaves out steps

    def start(self, progress: Progress, extra_state: ExtraState) -> None:
        self.progress, self._counted_to, self._norm_at = progress, progress.step, progress.step
        self.step_offset = int(values_of(extra_state, _NAMESPACE, 1).get("offset", 0))  # type: ignore[arg-type]
        if self.tensors is not None:
            self.tensors.start(extra_state)
        if progress.step >= self.plan.train_steps:
            self.enter_consistent_point(0)

    def next(self) -> WorkItem | ConsistentPoint | None:
        if self._point is not None:
            point, self._point = self._point, None
            if self._is_requested or point.last:
                point = point._replace(reasons=self._reasons())
            return point
        if self.has_ended:
            return None
        share, (step, data_cursor) = self._share, self.progress
        return WorkItem(step, data_cursor + share.offset, share.micro_batches, share.batches)

    def begin(self, loss: SupportsFloat) -> None:
        self.loss = loss
        if self._norm_steps:
            step = self.progress.step + 1
            self.measures_norm = step // self._norm_steps > self._norm_at // self._norm_steps
            self._norm_at = step

    def request_pause(self, reason: str) -> None:
        self._pauses.add(reason)
        self.flags |= PAUSE

    def request_stop(self) -> None:
        self.flags |= STOP

    def snapshot(self) -> Snapshot:
        self.await_release()
        return self.snapshot_of({name: self.vector(name) for name in self.plan.vectors})

    def stats(self) -> Stats:
        counts = self._counted_to, self._loss_sum, self._updated, self._skipped
        return Stats(*counts, [], grad_norm=self.grad_norm, moved=self._moved)

    def move_to(self, progress: Progress) -> None:
        """Continue at another step and another position of the data, with the same number of updates.

        Called by all workers at a ``ConsistentPoint`` or before the first step. Schedules follow the step.
        """
        moved = progress.step - self.progress.step
        self.progress, self._counted_to = progress, self._counted_to + moved
        self._moved += moved
        self.step_offset -= moved
        self._updater.schedule_offset = -self.step_offset
        self.has_ended, self._point = False, None  # also if it resumed behind the last step of a shorter run
        if progress.step >= self.plan.train_steps:
            self.enter_consistent_point(0)

    # For subclasses.

    def extra_state(self) -> ExtraState:
        """Return state of the mode that is not in the vectors; ``start`` restores it. Collective over the workers."""
        state = {} if self.tensors is None else dict(self.tensors.extra_state())
        return state | ({_NAMESPACE: Versioned(1, {"offset": self.step_offset})} if self.step_offset else {})

    @property
    def rule_step(self) -> int:
        """The step for the optimizer, which counts updates."""
        return self.progress.step + self.step_offset

    def snapshot_of(self, vectors: Mapping[str, Array], private: bool = False) -> Snapshot:
        """Return a snapshot of these vectors with the ``extra_state``; ``await_release`` waits for its release.

        Args:
            private: Whether the vectors are copies that do not change.
        """
        self._snapshot = Snapshot(vectors, *self.progress, self.extra_state(), private)
        return self._snapshot

    def await_release(self) -> None:
        """Wait until the vectors of the last snapshot may change; quick if nothing is being saved."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot = None

    def tally_totals(self, step: int, loss: float, updated: int, skipped: int) -> None:
        """Add the results of several steps up to ``step``: the sum of losses, the numbers of updates and skips."""
        self._counted_to = step
        self._loss_sum += loss
        self._updated += updated
        self._skipped += skipped

    def accept(self, losses: Array) -> bool:
        """Return whether to update with a step's gradient; ``--nan`` determines the result if a loss is not finite.

        Args:
            losses: Every worker's share of the loss, shape (workers,), the same on all workers.

        Raises:
            NonFiniteLoss: A loss is not finite and ``--nan`` is ``stop``; on all workers.
        """
        return self.non_finite.check(float(losses.sum()), losses, self.progress.step)

    def count(self, loss: float, updated: bool) -> None:
        """Count one step whose result is known."""
        self.advance()
        self.tally(loss, updated)

    def advance(self) -> None:
        """Count one step. ``tally`` counts the result of the step, which may be known later."""
        step, data_cursor = self.progress
        if step >= self.plan.train_steps:
            name = type(self).__name__
            raise RuntimeError(f"{name} did not call enter_consistent_point at the last step, {step:,}")
        self.progress = Progress(step + 1, data_cursor + self._examples)

    def tally(self, loss: float, updated: bool) -> None:
        """Count the result of a step."""
        self.last_result = StepResult(loss, updated)
        self._counted_to += 1
        if updated:
            self._loss_sum += loss
            self._updated += 1
        else:
            self._skipped += 1

    def enter_consistent_point(self, flags: int) -> None:
        """Make this step a consistent point. Collective over the workers.

        Args:
            flags: The union of all workers' ``flags``, the same on all workers.
        """
        step, data_cursor = self.progress
        self.has_ended = bool(flags & STOP) or step >= self.plan.train_steps
        self._is_requested = bool(flags & PAUSE)
        self._point = ConsistentPoint(step, data_cursor, _NO_REASONS, self.has_ended)

    def _reasons(self) -> frozenset[str]:
        """Return the reasons for the point that is reached. Collective over the workers.

        The reasons of the last point include requests made after the last step, which no worker's flags contain.
        """
        self.flags &= ~PAUSE
        with _WAIT:
            return self._pauses.take()
