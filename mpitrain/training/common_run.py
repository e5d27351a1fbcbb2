"""The directory of the run that learners have joined (``--join``); the learner that merges writes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from .. import checkpoint
from ..checkpoint import BestCheckpoint, Snapshot
from ..core.layout import Array
from ..monitor.heartbeat import Heartbeat, RunEnd
from ..monitor.metrics import MetricsFile
from ..monitor.run_record import CONFIG, RunRecord
from ..plan.hook import TrainingLoop
from ..plan.metric import PREFIX
from ..plan.plan import Plan
from ..plan.progress import ConsistentPoint
from ..strategy.learners.learner import Learner
from .checkpointing import file_writer
from .hooks import SAVE, Trigger

_REPORT_S = 10.0  # seconds between two reports of what learners have exchanged, except the first ones
_log = logging.getLogger(__name__)


class CommonRun:
    """Writes record, status, metrics and checkpoints of the common model while this process merges. Local; chief only.

    Its steps are those of the first learner: the number of examples that the common model contains, divided by the
    number of examples of such a step.
    """

    def __init__(self, folder: Path, plan: Plan, record: RunRecord, learner: Learner) -> None:
        self._folder, self._plan, self._record, self._learner = folder, plan, record, learner
        self._heartbeat: Heartbeat | None = None
        self._metrics: MetricsFile | None = None
        self._since = self._reported_s = time.monotonic()
        self._report_s = 1.0
        self._validated = -1  # the step of the learner's last validation that is among the metrics
        self._saving = Trigger(plan.config.saving.save_steps, 0.0, SAVE)
        self._checkpoints = folder / "checkpoints"
        self._writer = file_writer(plan, self._checkpoints, record.tables)

    def begin(self, loop: TrainingLoop) -> None:
        """Begin to count the steps of ``--save-steps``."""
        self._saving.begin(loop.step)

    def update(self, loop: TrainingLoop) -> None:
        """Begin or end to write, as the lease demands, and write metrics that are due, also those of the learner."""
        learner = self._learner
        if learner.is_replaced:
            return
        if not learner.holds_lease:
            self._close()
        elif self._heartbeat is None:
            self._open()
        now = time.monotonic()
        if now - self._reported_s >= self._report_s:
            self._reported_s, self._report_s, speeds = now, min(_REPORT_S, 2 * self._report_s), learner.speeds
            loop.report(loop.step, learner.counts, show=False)
            loop.report(loop.step, {}, show=False)  # what the time went into
            if self._metrics is not None and (speed := sum(speeds)):
                values = {"learners": len(speeds), "examples_per_s": speed, "step_s": learner.unit / speed}
                self._metrics.write(self._step, now - self._since, values)
        self._write_validation(loop)

    def _write_validation(self, loop: TrainingLoop) -> None:
        """Write the learner's last validation, which is one of the common model, unless it is written already."""
        if self._metrics is not None and loop.validation_step > self._validated:
            self._validated = loop.validation_step
            self._metrics.write(self._step, time.monotonic() - self._since, loop.validation)
            self._keep_best(loop.validation)

    def at_consistent_point(self, point: ConsistentPoint) -> None:
        """Save the common model where this learner saves its own state."""
        if self._saving.consume(point) and not point.last and self._heartbeat is not None:
            self._save(None)

    def save(self, params: Array, examples: int) -> None:
        """Save these common parameters, and leave the directory to other processes.

        Raises:
            OSError: They cannot be saved.
        """
        step = self._step_of(examples)
        self._writer.save(Snapshot({"params": params}, step, examples, private=True))
        self._writer.finish()
        if self._writer.failure is not None:
            raise OSError(self._writer.errno, self._writer.failure)
        _log.info("common model of %s examples: %s", f"{examples:,}", checkpoint.path_for(self._checkpoints, step))
        if self._heartbeat is None:
            self._open()
        self._close(RunEnd("stopped"))  # until another learner merges

    def finish(self, is_last: bool) -> None:
        """Write again if this process was the last one that has merged."""
        self._close()
        if is_last:
            self._open()

    def end(self, loop: TrainingLoop) -> None:
        """Record what became of the learner's work; and the end of the run, if this process has merged last."""
        loop.report(loop.step, self._learner.counts, show=False)
        if self._heartbeat is not None:
            self._write_validation(loop)
            self._writer.finish()
            ended = self._learner.ended
            early = RunEnd("finished early", ended) if ended else RunEnd("stopped")
            self._heartbeat.end(RunEnd("finished") if self._learner.is_complete else early)
        self.close()

    def close(self) -> None:
        """End the threads and close the files, also after an error."""
        self._writer.close()
        self._close()

    def _open(self) -> None:
        learner, path, self._since = self._learner, self._folder / "metrics.jsonl", time.monotonic()
        try:
            if not (self._folder / CONFIG).exists():
                self._record.write(0)
            self._metrics = MetricsFile(path)
        except OSError as error:
            _log.warning("%s cannot be written: %s; training continues", path, error.strerror)
        self._heartbeat = Heartbeat(
            self._folder,
            "learners",
            self._step_of(learner.total),
            lambda: self._step_of(min(learner.merged, learner.total)),
        )

    def _close(self, end: RunEnd | None = None) -> None:
        """End to write; ``end``: the state until another process writes."""
        if self._heartbeat is not None and end is not None:
            self._heartbeat.end(end)
        elif self._heartbeat is not None:
            self._heartbeat.abandon()
        if self._metrics is not None:
            self._metrics.close()
        self._heartbeat = self._metrics = None

    def _keep_best(self, validation: Mapping[str, float]) -> None:
        """Save the common model if this validation of it is the best one so far."""
        goal = self._plan.config.training.goal
        if goal is None or not self._plan.config.saving.keep_best:
            return
        value, best = validation[PREFIX + goal.name], checkpoint.best(self._checkpoints)
        if goal.is_better(value, None if best is None or best.metric != goal.name else best.value):
            self._writer.finish()
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
