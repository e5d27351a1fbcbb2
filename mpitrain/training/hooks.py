"""The built-in hooks: logging, validation, checkpoints, stopping."""

from __future__ import annotations

import math
import time
from typing import Any

from ..monitor import worker_stats
from ..monitor.worker_stats import WorkerStats
from ..plan.hook import Hook
from ..process.rank_status import RankStatusFile
from ..process.signals import Signals, TimeLimit
from ..strategy.base import Totals


class EveryNSteps:
    """Decides when an action that is done every N steps is due.

    Args:
        every: N; 0 for never.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._last = 0

    def start(self, step: int) -> None:
        """Count from ``step``."""
        self._last = step

    def due(self, step: int) -> bool:
        """Return whether a multiple of N was reached or passed since this last returned True."""
        if not self._every or step // self._every <= self._last // self._every:
            return False
        self._last = step
        return True

    def next(self, step: int, end: int) -> int:
        """Return the first multiple of N after ``step``, at most ``end``."""
        return min(end, (step // self._every + 1) * self._every) if self._every else end


class Log(Hook):
    """Reports loss, learning rate and speed every N steps, averaged over all workers since the last report.

    The first step's time is excluded, because kernels are compiled in it on a machine's first run.
    """

    def __init__(self, every: int) -> None:
        self._when = EveryNSteps(every)

    def begin(self, loop: Any) -> None:
        self._when.start(loop.step)
        self._timed = self._warned = False
        self._compared_from: list[WorkerStats] | None = None
        self._start(loop)

    def after_step(self, loop: Any) -> None:
        if not self._timed:
            self._timed = True
            self._timed_from = loop.step, _seconds(loop)
        if loop.settled and self._when.due(loop.step):
            totals = self._report(loop) if loop.cluster.chief else None
            self._start(loop, totals)

    def end(self, loop: Any) -> None:
        # In the asynchronous modes another worker may have taken the last step.
        if self._when.due(loop.step) and loop.cluster.chief:
            self._report(loop)

    def _report(self, loop: Any) -> Totals:
        totals, before = loop.totals(), self._totals
        steps, seconds = loop.step - self._timed_from[0], _seconds(loop) - self._timed_from[1]
        counted = totals.steps - before.steps
        values = {
            "loss": (totals.loss - before.loss) / counted if counted else math.nan,
            "learning_rate": loop.learning_rate,
        }
        if steps:
            values |= {"examples_per_s": steps * loop.step_examples / seconds, "step_s": seconds / steps}
        if totals.skipped > before.skipped:
            values["skipped_steps"] = totals.skipped - before.skipped
        loop.report(loop.step, values | worker_stats.since(before.worker_stats, totals.worker_stats, loop.plan.nbytes))
        self._compare_shares(loop, totals.worker_stats)
        return totals

    def _compare_shares(self, loop: Any, now: list[WorkerStats]) -> None:
        """Warn once if a worker takes too small a share; the time before the first report does not count."""
        if self._compared_from is None:
            self._compared_from = now
        warning = worker_stats.uneven_speed_warning(self._compared_from, now)
        if warning and not self._warned:
            self._warned = True
            loop.say(f"warning: {warning}")

    def _start(self, loop: Any, totals: Totals | None = None) -> None:
        self._timed_from = loop.step, _seconds(loop)
        if loop.cluster.chief:
            self._totals = totals or loop.totals()


def _seconds(loop: Any) -> float:
    """Return the time spent in steps. Validation and saving are excluded if workers stop for them, in lockstep."""
    return loop.training_s if loop.lockstep else time.perf_counter()


class Validate(Hook):
    """Measures loss and accuracy on the validation examples every N steps and at the end."""

    def __init__(self, every: int) -> None:
        self._when = EveryNSteps(every)

    def begin(self, loop: Any) -> None:
        self._when.start(loop.step)

    def after_step(self, loop: Any) -> None:
        if loop.settled and self._when.due(loop.step):
            loop.validate_now()
        loop.report_validation()

    def end(self, loop: Any) -> None:
        loop.validate_at_end()


class Save(Hook):
    """Writes a checkpoint every N steps, every S seconds, and at the end."""

    def __init__(self, every: int, every_s: float) -> None:
        self._when, self._every_s = EveryNSteps(every), every_s
        self._done_at = -1

    def begin(self, loop: Any) -> None:
        self._when.start(loop.step)
        self._done_s, self._requested = time.monotonic(), False
        if loop.saved:
            self._done_at = loop.step
        loop.pause_at(self._when.next(loop.step, loop.train_steps))

    def after_step(self, loop: Any) -> None:
        self._look_at_clock(loop)
        if loop.lockstep and loop.settled and (self._when.due(loop.step) or loop.paused):
            self._save(loop)
        loop.saving.tell()

    def paused(self, loop: Any) -> None:
        """Save; called on the chief when all workers are paused at the step requested by ``begin`` or this method."""
        self._save(loop)
        loop.pause_at(self._when.next(loop.step, loop.train_steps))

    def end(self, loop: Any) -> None:
        if self._done_at != loop.step:
            self._save(loop)
        loop.saving.finish()

    def _save(self, loop: Any) -> None:
        self._done_at = loop.step
        self._done_s, self._requested = time.monotonic(), False
        loop.saving.save()

    def _look_at_clock(self, loop: Any) -> None:
        """Request a pause when a save is due by time; on the chief, whose clock counts for all."""
        due = self._every_s > 0 and time.monotonic() - self._done_s >= self._every_s
        if due and loop.cluster.chief and not self._requested:
            self._requested = True
            loop.pause_soon()


class Stop(Hook):
    """Stops the run after a signal, and early enough to save before an external time limit.

    Args:
        signals: The signals of this rank.
        limit: The time limit; only the chief's clock counts.

    Attributes:
        asked: Whether this worker has requested the stop.
    """

    def __init__(self, signals: Signals, limit: TimeLimit) -> None:
        self._signals, self._limit = signals, limit
        self.requested = False

    def begin(self, loop: Any) -> None:
        self._last_s = time.time()

    def after_step(self, loop: Any) -> None:
        now = time.time()
        step_s, self._last_s = now - self._last_s, now
        if self.requested:
            return
        why = self._signals.received
        if why is None and loop.cluster.chief and self._limit.reached(now, step_s, loop.saving.longest_s):
            why = "the time limit is near"
        if why is not None:
            self.requested = True
            # Launchers send SIGTERM when another rank has died, and may leave no time to save.
            loop.say(f"stopping after step {loop.step:,}{'' if why == 'SIGTERM' else ' to save'}: {why}")
            loop.stop()


class ReportStep(Hook):
    """Records this worker's step in its rank status, where ``mpitrain run`` reads it if the worker dies."""

    def __init__(self, status: RankStatusFile) -> None:
        self._status = status

    def begin(self, loop: Any) -> None:
        self._status.set_step(loop.step)

    def after_step(self, loop: Any) -> None:
        self._status.set_step(loop.step)
