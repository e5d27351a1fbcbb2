"""The directory of the run that learners have joined (``--join``); the learner that merges writes it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from .. import checkpoint
from ..checkpoint import BestCheckpoint, Retention, Snapshot
from ..checkpoint.writer import CheckpointWriter
from ..core.layout import Array
from ..monitor.heartbeat import Heartbeat, RunEnd, State
from ..monitor.metrics import MetricsFile
from ..monitor.run_record import RunRecord
from ..plan.hook import TrainingLoop
from ..plan.metric import PREFIX
from ..plan.plan import Plan
from ..plan.progress import ConsistentPoint
from ..strategy.learners.learner import Learner
from .checkpointing import facts_of_run
from .hooks import SAVE, Trigger

REPORT_S = 10.0  # seconds between two reports of what learners have exchanged
_log = logging.getLogger(__name__)


class CommonRun:
    """Writes status, metrics and checkpoints of the common model while this process merges. Local; chief only.

    Its steps are those of the first learner: the number of examples that the common model contains, divided by the
    number of examples of such a step.
    """

    def __init__(self, folder: Path, plan: Plan, record: RunRecord, learner: Learner) -> None:
        self._folder, self._plan, self._learner = folder, plan, learner
        self._heartbeat: Heartbeat | None = None
        self._metrics: MetricsFile | None = None
        self._since = self._reported_s = time.monotonic()
        self._validated = -1  # the step of the learner's last validation that is among the metrics
        self._saving = Trigger(plan.config.saving.save_steps, 0.0, SAVE)
        self._checkpoints = folder / "checkpoints"
        saving, facts = plan.config.saving, facts_of_run(plan, record.tables)

        def write(snapshot: Snapshot) -> None:
            path = checkpoint.path_for(self._checkpoints, snapshot.step)
            path.parent.mkdir(exist_ok=True)
            checkpoint.write(path, plan.layout, snapshot, plan.config.training.seed, facts, saving.save_compression)

        self._writer = CheckpointWriter(
            self._checkpoints, write, Retention(saving.keep, saving.keep_every), saving.save_background
        )

    def begin(self, loop: TrainingLoop) -> None:
        """Begin to count the steps of ``--save-steps``."""
        self._saving.begin(loop.step)

    def update(self, loop: TrainingLoop) -> None:
        """Begin or end to write, as the lease demands, and write metrics that are due."""
        if self._learner.holds_lease != (self._heartbeat is not None):
            if self._learner.holds_lease:
                self._open()
            else:
                self._close()
        self._write_metrics(loop)

    def _write_metrics(self, loop: TrainingLoop) -> None:
        """Write the metrics that are due, if this process merges."""
        learner, now = self._learner, time.monotonic()
        if self._metrics is None:
            return
        values: dict[str, Any] = {}
        speed = sum(learner.speeds)
        if now - self._reported_s >= REPORT_S and speed:
            self._reported_s = now
            values |= {"learners": len(learner.speeds), "examples_per_s": speed, "step_s": learner.unit / speed}
        if loop.validation_step > self._validated:
            self._validated = loop.validation_step
            values |= loop.validation
            self._keep_best(dict(loop.validation))
        if values:
            self._metrics.write(self._step, now - self._since, values)

    def at_consistent_point(self, point: ConsistentPoint) -> None:
        """Save the common model where this learner saves its own state."""
        if self._saving.consume(point) and not point.last and self._heartbeat is not None:
            self._save(None)

    def save(self, params: Array, examples: int) -> None:
        """Save these common parameters.

        Raises:
            OSError: They cannot be saved.
        """
        step = self._step_of(examples)
        self._writer.save(Snapshot({"params": params}, step, examples, private=True))
        self._writer.finish()
        if self._writer.failure is not None:
            raise OSError(self._writer.errno, self._writer.failure)
        _log.info("common model of %s examples: %s", f"{examples:,}", checkpoint.path_for(self._checkpoints, step))

    def finish(self, is_last: bool) -> None:
        """Leave the directory to other processes, unless this one was the last one that has merged."""
        if not is_last:
            self._close()
        elif self._heartbeat is None:
            self._open()

    def end(self, loop: TrainingLoop) -> None:
        """Record the last validation and the end of the run, if this process was the last one that has merged."""
        if self._heartbeat is not None:
            self._write_metrics(loop)
            state: State = "finished" if self._learner.is_complete else "stopped"
            self._heartbeat.end(RunEnd(state))
        self._writer.close()
        self._close()

    def _open(self) -> None:
        learner = self._learner
        self._metrics, self._since = MetricsFile(self._folder / "metrics.jsonl"), time.monotonic()
        self._heartbeat = Heartbeat(
            self._folder,
            "learners",
            self._step_of(learner.total),
            lambda: self._step_of(min(learner.merged, learner.total)),
        )

    def _close(self) -> None:
        if self._heartbeat is not None and self._metrics is not None:
            self._heartbeat.abandon()
            self._metrics.close()
        self._heartbeat = self._metrics = None

    def _keep_best(self, validation: dict[str, float]) -> None:
        """Save the common model if this validation of it is the best one so far."""
        goal = self._plan.config.training.goal
        if goal is None or not self._plan.config.saving.keep_best:
            return
        value, before = validation[PREFIX + goal.name], checkpoint.best(self._checkpoints)
        if before is None or before.metric != goal.name or goal.is_better(value, before.value):
            is_saved = checkpoint.path_for(self._checkpoints, self._step).exists()
            self._save(BestCheckpoint(self._step, goal.name, value, only_best=not is_saved))

    def _save(self, best: BestCheckpoint | None) -> None:
        """Save the common parameters as this learner has last received them, in the background."""
        learner = self._learner
        snapshot = Snapshot({"params": learner.center.copy()}, self._step, learner.received, private=True)
        snapshot.best = best
        self._writer.save(snapshot)

    @property
    def _step(self) -> int:
        """The step of the common parameters that this learner has last received."""
        return self._step_of(self._learner.received)

    def _step_of(self, examples: int) -> int:
        return -(-examples // self._learner.unit)
