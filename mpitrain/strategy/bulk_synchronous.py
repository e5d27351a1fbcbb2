"""The common part of ``sync`` and ``local``: all workers take the same steps, each with its own batch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..core.layout import Array
from ..plan.plan import Plan
from .base import StepResult, Totals, Turn, WorkItem

STOP = 1  # flag: a rank was asked to stop
PAUSE = 2  # flag: the chief was asked for a pause


class BulkSynchronous:
    """Counts steps and examples; subclasses add the rest of ``base.Strategy``.

    Args:
        rank: Index of this worker among the workers.
        step, data_cursor: Where training begins.
    """

    lockstep = True
    on_device = False
    loss_scale: Array | None = None

    def __init__(self, plan: Plan, rank: int, step: int, data_cursor: int) -> None:
        self._first, self._examples = rank * plan.batch, plan.step_examples
        self._train_steps = plan.train_steps
        self.step, self.data_cursor = step, data_cursor
        self._flags = 0  # of this rank
        self._stopping = False  # like ``paused``, agreed on by all workers
        self.paused = False
        self._loss, self._counted, self._skipped = 0.0, 0, 0
        self._result = StepResult(math.nan, True)

    @property
    def result(self) -> StepResult:
        return self._result

    @property
    def settled(self) -> bool:
        return True

    @property
    def extra_state(self) -> Mapping[str, float]:
        return {}

    def pause_at(self, step: int) -> None:
        """Do nothing: no worker continues before all have finished the step."""

    def pause_soon(self) -> None:
        self._flags |= PAUSE

    def next(self) -> WorkItem | Turn:
        self.paused = False
        if self._stopping or self.step >= self._train_steps:
            return Turn.END
        return WorkItem(self.step, self.data_cursor + self._first)

    def stop(self) -> None:
        self._flags |= STOP

    def close(self) -> None:
        """Do nothing: all workers have the same parameters."""

    def gather(self, name: str) -> Array:
        raise NotImplementedError

    def on_device_copy(self, name: str) -> Array:
        return self.gather(name)

    def totals(self) -> Totals:
        return Totals(self._loss, self._counted, self._skipped, [])

    def _hear(self, flags: int) -> None:
        """Handle the union of all workers' flags."""
        self._stopping, self.paused = bool(flags & STOP), bool(flags & PAUSE)
        if self.paused:
            self._flags &= ~PAUSE

    def _count(self, loss: float, updated: bool) -> None:
        """Count one step."""
        self._advance()
        self._tally(loss, updated)

    def _advance(self) -> None:
        self.step += 1
        self.data_cursor += self._examples

    def _tally(self, loss: float, updated: bool) -> None:
        self._result = StepResult(loss, updated)
        if updated:
            self._loss += loss
            self._counted += 1
        else:
            self._skipped += 1
