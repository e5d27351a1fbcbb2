"""The built-in hooks: logging, validation, checkpoints, stopping."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from ..checkpoint import BestCheckpoint
from ..core import subnormals
from ..monitor import worker_stats
from ..monitor.console import Console
from ..monitor.trace import span
from ..monitor.worker_stats import WorkerStats
from ..plan.hook import Hook, TrainingLoop
from ..plan.progress import ConsistentPoint
from ..process.rank_status import RankStatusFile
from ..process.run_directory import is_stop_requested
from ..process.signals import Signals, TimeLimit
from ..strategy.base import Stats, Strategy
from .checkpointing import Checkpoints, finish_saving
from .evaluation import Evaluator
from .run_state import RunState

_log = logging.getLogger(__name__)

_CHECK_STEPS = 100  # steps between two checks of flush-to-zero
_LOOK_S = 1.0  # seconds between two looks for a request to stop
SAVE, VALIDATE = "save", "validate"  # reasons of the hooks' requests for a consistent point


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

    def reached(self, step: int) -> bool:
        """Return whether a multiple of N was reached or passed since ``start``, or since ``consume`` returned True."""
        return self._every > 0 and step // self._every > self._last // self._every

    def consume(self, step: int) -> bool:
        """Return ``reached``; if it is True, count from ``step`` from now on."""
        if not self.reached(step):
            return False
        self._last = step
        return True


class Trigger:
    """Decides at which consistent points an action is due: every N steps, every S seconds, on request, and at the end.

    Args:
        every: N; 0 for never.
        every_s: S, by the chief's clock; 0 for never.
        reason: The reason of a request, see ``TrainingLoop.request_pause``.
    """

    def __init__(self, every: int, every_s: float, reason: str) -> None:
        self._steps, self._every_s, self._reason = EveryNSteps(every), every_s, reason
        self.restart()

    def begin(self, step: int) -> None:
        """Count steps from ``step``, and seconds from now."""
        self._steps.start(step)
        self.restart()

    def restart(self) -> None:
        """Count seconds from now."""
        self._since, self._requested = time.monotonic(), False

    def request_if_due(self, loop: TrainingLoop) -> None:
        """Request a point, once, if S seconds have passed. Local; no effect except on the chief."""
        if self._every_s and loop.cluster.chief and not self._requested and not self._steps.reached(loop.step):
            self._requested = time.monotonic() - self._since >= self._every_s
            if self._requested:
                loop.request_pause(self._reason)

    def consume(self, point: ConsistentPoint) -> bool:
        """Return whether the action is due at this point; the same on all workers. Call once for each point."""
        return self._steps.consume(point.step) or self._reason in point.reasons or point.last


class Log(Hook):
    """Reports every N steps the learning rate, and the mean loss and speed of all workers since the last report.

    The time of the first step is excluded, because the first run on a machine compiles kernels in this step. If workers
    exchange results only at some steps, the report waits for the next of these steps. All reports are recorded.

    Args:
        every: N; 0 for never.
        print_every_s: Shortest time between two printed reports, in seconds. The first report is always printed, and
            the last one unless a later validation was printed.
        counts_examples: Whether the speed is also reported in examples per second.
    """

    def __init__(self, every: int, print_every_s: float, strategy: Strategy, counts_examples: bool = True) -> None:
        self._when, self._print_every_s, self._strategy = EveryNSteps(every), print_every_s, strategy
        self._counts_examples = counts_examples

    def begin(self, loop: TrainingLoop) -> None:
        self._chief, self._reported_s = loop.cluster.chief, loop.training_s
        self._printed_s = -math.inf
        self._unprinted: tuple[int, dict[str, float]] | None = None
        self._reported_steps = loop.step
        self._when.start(loop.step)
        self._timed = self._warned = False
        self._compared_from: list[WorkerStats] | None = None
        if loop.cluster.chief:
            self._before = self._strategy.stats()

    def after_step(self, loop: TrainingLoop) -> None:
        if not self._chief:
            return
        if not self._timed:
            self._timed, self._reported_s = True, loop.training_s
            self._reported_steps = loop.step - self._strategy.stats().moved
        self._report_if_due(loop)

    def at_consistent_point(self, loop: TrainingLoop, point: ConsistentPoint) -> None:
        if point.last:  # before the last validation is printed
            self._print(loop)

    def end(self, loop: TrainingLoop) -> None:
        # In modes with servers another worker may have taken the last step.
        if loop.cluster.chief:
            self._report_if_due(loop)
            self._print(loop)

    def _report_if_due(self, loop: TrainingLoop) -> None:
        if self._when.reached(loop.step):
            stats = self._strategy.stats()
            if self._when.consume(stats.step):
                self._report(loop, stats)

    def _report(self, loop: TrainingLoop, stats: Stats) -> None:
        before, self._before = self._before, stats
        now = loop.training_s
        taken = stats.step - stats.moved
        steps, seconds = taken - self._reported_steps, now - self._reported_s
        counted = stats.steps - before.steps
        values = {
            "loss": (stats.loss - before.loss) / counted if counted else math.nan,
            # Not ``loop.learning_rate``: with servers, other workers may have taken steps since this worker's last one.
            "learning_rate": loop.plan.optimizer.rate(max(stats.step - 1, 0)),
        }
        if steps:
            examples_per_s = {"examples_per_s": steps * loop.plan.step_examples / seconds}
            values |= {**(examples_per_s if self._counts_examples else {}), "step_s": seconds / steps}
        if stats.skipped > before.skipped:
            values["skipped_steps"] = stats.skipped - before.skipped
        if stats.grad_norm is not None:
            values["grad_norm"] = stats.grad_norm
        for name in ("internode_bytes", "saved_bytes"):
            if getattr(stats, name) > getattr(before, name):
                values[name] = getattr(stats, name) - getattr(before, name)
        values |= worker_stats.since(before.workers, stats.workers, loop.plan.nbytes, stats.gradient_nbytes)
        loop.report(stats.step, values, show=False)
        self._unprinted = stats.step, values
        if time.monotonic() >= self._printed_s + self._print_every_s:
            self._print(loop)
        self._compare_shares(stats.workers)
        self._reported_steps, self._reported_s = taken, now

    def _print(self, loop: TrainingLoop) -> None:
        """Print the latest report, unless this report or a later validation was already printed."""
        if self._unprinted is not None and self._unprinted[0] >= loop.validation_step:
            loop.report(*self._unprinted, record=False)
            self._unprinted, self._printed_s = None, time.monotonic()

    def _compare_shares(self, now: list[WorkerStats]) -> None:
        """Warn once if a worker takes too few of the steps; the time before the first report does not count."""
        if self._compared_from is None:
            self._compared_from = now
        warning = worker_stats.uneven_speed_warning(self._compared_from, now)
        if warning and not self._warned:
            self._warned = True
            _log.warning("%s", warning)


class Validate(Hook):
    """Measures loss, accuracy and metrics on the validation examples every N steps, every S seconds, and at the end.

    The same parameters are measured once.
    """

    purpose = "validation"

    def __init__(
        self, every: int, every_s: float, evaluator: Evaluator, measured: Callable[[int], float] = float
    ) -> None:
        self._trigger, self._evaluator, self._measured = Trigger(every, every_s, VALIDATE), evaluator, measured
        self._done_at = -1.0

    def begin(self, loop: TrainingLoop) -> None:
        self._trigger.begin(loop.step)

    def after_step(self, loop: TrainingLoop) -> None:
        self._trigger.request_if_due(loop)

    def at_consistent_point(self, loop: TrainingLoop, point: ConsistentPoint) -> None:
        due, measured = self._trigger.consume(point), self._measured(point.step)
        if due and self._done_at != measured:
            self._done_at = measured
            loop.add_validation(point.step, self._evaluator.evaluate())
        if due:
            self._trigger.restart()


class Save(Hook):
    """Writes a checkpoint every N steps, every S seconds, at the end, and of the best step.

    Args:
        state: The state that is saved.
        saved: Whether the step at which training begins need not be saved.
        best: Returns the record of a step whose checkpoint is the best one, else None; the same on all workers.
    """

    purpose = "saving"

    def __init__(
        self,
        every: int,
        every_s: float,
        state: RunState,
        checkpoints: Checkpoints,
        saved: bool,
        best: Callable[[int], BestCheckpoint | None] = lambda step: None,
    ) -> None:
        self._trigger, self._checkpoints, self._best = Trigger(every, every_s, SAVE), checkpoints, best
        self._state, self._saved, self._done_at = state, saved, -1

    def begin(self, loop: TrainingLoop) -> None:
        self._trigger.begin(loop.step)
        if self._saved:
            self._done_at = loop.step

    def after_step(self, loop: TrainingLoop) -> None:
        self._checkpoints.progress()
        self._trigger.request_if_due(loop)

    def at_consistent_point(self, loop: TrainingLoop, point: ConsistentPoint) -> None:
        due, best = self._trigger.consume(point), self._best(point.step)
        if (due or best is not None) and self._done_at != point.step:
            with span("save"):
                snapshot = self._state.snapshot()
                snapshot.best = None if best is None else best._replace(only_best=not due)
                self._checkpoints.save(snapshot)
            self._done_at = point.step
        if due:
            self._trigger.restart()

    def end(self, loop: TrainingLoop) -> None:
        finish_saving(self._checkpoints, loop.cluster.training)


class ShowProgress(Hook):
    """Shows the chief's progress bar."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, loop: TrainingLoop) -> None:
        self._console.start(loop.step, loop.train_steps)

    def after_step(self, loop: TrainingLoop) -> None:
        self._console.advance(loop.step)

    def end(self, loop: TrainingLoop) -> None:
        self._console.advance(loop.step)
        self._console.stop()


class Stop(Hook):
    """Stops the run after a signal or a request, and early enough to save before an external time limit.

    Args:
        strategy: The strategy that is asked to stop.
        signals: The signals of this rank.
        limit: The time limit; only the chief's clock counts.
        checkpoints: The duration of their longest save is left for saving before the time limit.
        folder: The run directory, if the chief looks for requests there; None if ``mpitrain run`` does.

    Attributes:
        reason: Why this worker has requested the stop; empty if it has not.
    """

    def __init__(
        self, strategy: Strategy, signals: Signals, limit: TimeLimit, checkpoints: Checkpoints, folder: Path | None
    ) -> None:
        self._strategy, self._signals, self._limit, self._checkpoints = strategy, signals, limit, checkpoints
        self._folder, self.reason = folder, ""
        self._last_s = self._looked_s = time.time()

    def begin(self, loop: TrainingLoop) -> None:
        self._last_s = time.time()

    def after_step(self, loop: TrainingLoop) -> None:
        before, self._last_s = self._last_s, time.time()
        self.look(loop.cluster.chief, loop.step, self._last_s - before)

    def look(self, is_chief: bool, step: int, step_s: float = 0.0) -> bool:
        """Request the stop if there is a reason; return whether this worker has requested it. Local.

        Called after every step, and by a learner that waits for examples.
        """
        now, why = time.time(), self._signals.received
        if self.reason:
            return True
        if why is None and is_chief and self._limit.reached(now, step_s, self._checkpoints.longest_s):
            why = "the time limit is near"
        if why is None and self._folder is not None and is_chief and now - self._looked_s > _LOOK_S:
            self._looked_s = now
            why = "mpitrain stop" if is_stop_requested(self._folder) else None
        if why is not None:
            self.reason = why
            # Launchers send SIGTERM when another rank has died, and may leave no time to save.
            _log.info("stopping after step %s%s: %s", f"{step:,}", "" if why == "SIGTERM" else " to save", why)
            self._strategy.request_stop()
        return why is not None


class KeepFlushing(Hook):
    """Restores the flushing of subnormal numbers if a library or a hook has switched it off, and warns once."""

    def begin(self, loop: TrainingLoop) -> None:
        self._steps, self._reported = EveryNSteps(_CHECK_STEPS), False
        self._steps.start(loop.step)

    def after_step(self, loop: TrainingLoop) -> None:
        if not self._steps.consume(loop.step) or subnormals.are_flushed():
            return
        subnormals.flush(True)
        if not self._reported and subnormals.are_flushed():
            self._reported = True
            _log.warning(
                "a library or a hook has switched off the flushing of subnormal numbers; mpitrain has switched it on "
                "again; to compute with subnormal numbers, pass --no-flush-denormals"
            )


class ReportStep(Hook):
    """Records this worker's step in its rank status. If the worker dies, ``mpitrain run`` reads the step there."""

    def __init__(self, status: RankStatusFile) -> None:
        self._status = status

    def begin(self, loop: TrainingLoop) -> None:
        self._status.set_step(loop.step)
        self._status.set_training()

    def after_step(self, loop: TrainingLoop) -> None:
        self._status.set_step(loop.step)
