"""A rank's log and trace, and on the chief the run's record, metrics, heartbeat and TensorBoard events."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..comm import clock_sync as clock
from ..comm.cluster import Cluster
from ..core.kernels import compile_seconds
from ..core.layout import Array, Layout
from ..core.words import counted
from ..monitor import trace
from ..monitor.console import Console
from ..monitor.goodput import KEY, REPEATED, SPARES, START, STEPS, WAITING, Account, accounts_in, opened
from ..monitor.heartbeat import Heartbeat, RunEnd
from ..monitor.loggers import Logger
from ..monitor.metrics import MetricsFile, read_lines
from ..monitor.rank_log import RankLog
from ..monitor.run_record import RunRecord
from ..monitor.tensorboard import Events, available
from ..plan.hook import Hook, TrainingLoop
from ..plan.plan import Plan
from ..process.launcher_env import FAILED_AT, FAILED_STEP, IDLE_SHARE, RESTARTS_SINCE, STARTED_AT
from ..process.pid import seconds_alive
from ..process.rank_status import RUN_DIR_VARIABLE, is_watched
from ..process.run_directory import cannot_write
from ..version import __version__
from .hooks import EveryNSteps
from .loop import Loop

_LONG_RUN_S = 60.0  # a run that has taken longer prints its goodput
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChiefFiles:
    """Files that only the chief writes.

    Attributes:
        events: None if no TensorBoard events are written.
        logger: The logger of an external service; None if there is none.
    """

    metrics: MetricsFile
    heartbeat: Heartbeat
    events: Events | None
    logger: Logger | None


class Telemetry:
    """Prints messages from the beginning, and writes to the run directory after ``open``.

    Construction is collective over all ranks.

    Args:
        folder: The run directory.
        console: The chief's console; None on other ranks.
    """

    def __init__(self, cluster: Cluster, plan: Plan, folder: Path, console: Console | None) -> None:
        self._cluster, self._folder, self._plan, self._config = cluster, folder, plan, plan.config
        self._chief: ChiefFiles | None = None
        self._loop: Loop | None = None
        self._log = RankLog(console, warns=RUN_DIR_VARIABLE in os.environ)
        _log.debug("%s, %s %d, process %d, mpitrain %s", *self._who(), os.getpid(), __version__)
        self._recorder = trace.record(self._config.output.trace_steps) if self._config.output.trace else None
        self._clock = self._measure_clock()

    def open(self, record: RunRecord | None, step: int) -> MetricsFile | None:
        """Write the run's record, and begin to write logs, metrics and heartbeats. Collective over all ranks.

        Args:
            record: The record of the run on the chief; None on other ranks.
            step: The step at which training begins.

        Returns:
            The metrics file on the chief, None on other ranks.

        Raises:
            LaunchError: A file in the run directory cannot be written; on every rank.
            ConfigError: ``--logger`` or ``--tensorboard`` needs a package, or cannot be used; on every rank.
        """
        with self._cluster.agree("opening the run directory"):
            try:
                self._log.open(self._folder, self._cluster.rank)
                if record is not None:
                    record.write(step)
                    self._chief = self._open(record, MetricsFile(self._folder / "metrics.jsonl"), step)
            except OSError as error:
                raise cannot_write(self._folder, error) from error
        return None if self._chief is None else self._chief.metrics

    def attach(self, loop: Loop, resumed: bool) -> None:
        """Record a worker's training from now on; call before it begins. Local."""
        self._loop = loop
        chief = self._chief
        if chief is None:
            return
        restart = _restart(loop.step) if is_watched(self._folder) else {}
        if resumed or restart:
            chief.metrics.write(loop.step, 0.0, {"resumed": loop.step, **restart})
        if chief.events is not None:
            chief.events.begin(loop.step)
            chief.metrics.listeners.append(chief.events.scalars)
        if chief.logger is not None:
            chief.metrics.listeners.append(chief.logger.log)

    def hooks(self, restoring_s: float, kept_steps: Callable[[], int] | None) -> list[Hook]:
        """Return the hooks that record the goodput and the requested histograms; an empty list except on the chief.

        Args:
            restoring_s: Seconds that it has taken to restore the state.
            kept_steps: See ``RecordGoodput``.
        """
        if self._chief is None:
            return []
        output = self._config.output
        hooks: list[Hook] = [
            RecordGoodput(self._chief.metrics, self._folder / "metrics.jsonl", restoring_s, kept_steps)
        ]
        if self._chief.events is not None and output.histogram_steps:
            hooks.append(Histograms(output.histogram_steps, self._chief.events))
        return hooks

    def write_trace(self) -> None:
        """Gather the ranks' traces and write them. Collective over all ranks."""
        if self._recorder is None:
            return
        trace.stop_recording()
        cluster = self._cluster
        role = f"{cluster.role} {cluster.task_index}"
        clocks = (self._clock, self._measure_clock())
        local = trace.RankTrace.of(cluster.rank, role, cluster.host, self._recorder.tracks, clocks)
        all_ranks = cluster.comm.gather(local, root=cluster.chief_rank)
        if all_ranks is not None and self._chief is not None:
            try:
                trace.write(self._folder / trace.TRACE, all_ranks, self._loop is not None and self._loop.synchronous)
            except OSError as error:  # the error is not fatal, because training has finished
                _log.warning("%s cannot be written: %s", self._folder / trace.TRACE, error.strerror)

    def abandon(self) -> None:
        """Leave the status to another process, which trains this run now. Local."""
        if self._chief is not None:
            self._chief.heartbeat.abandon()

    def close(self, end: RunEnd, error: BaseException | None) -> None:
        """Record how the run ended, with its error if any. Local."""
        if error is not None:
            self._log.failed(error)
        if self._chief is not None:
            if self._chief.events is not None:
                self._chief.events.close()
            if self._chief.logger is not None:
                self._chief.logger.close(end.state)
            self._chief.metrics.close()
            self._chief.heartbeat.end(end)
        self._log.close()

    def _open(self, record: RunRecord, metrics: MetricsFile, step: int) -> ChiefFiles:
        requested = self._config.output.tensorboard or self._config.output.histogram_steps > 0
        wanted = requested or (self._config.output.tensorboard is None and available())
        events = Events(self._folder / "tensorboard") if wanted else None
        workers, servers = len(self._cluster.worker_ranks), len(self._cluster.servers)
        ranks = counted(workers, "worker")
        ranks += f" + {counted(servers, 'server')}" if servers else ""
        steps = self._plan.train_steps
        heartbeat = Heartbeat(
            self._folder, ranks, steps, lambda: step if self._loop is None else min(steps, self._loop.recorded_step)
        )
        name = self._config.output.logger
        logger = None if name is None else Logger(name, self._folder, record.tables, resumes=step > 0)
        return ChiefFiles(metrics, heartbeat, events, logger)

    def _who(self) -> tuple[str, str, int]:
        return self._cluster.rank_description, self._cluster.role, self._cluster.task_index

    def _measure_clock(self) -> trace.Offset:
        """Return the measured clock offset; zeros without tracing. Collective over all ranks if tracing is on."""
        return trace.Offset(*clock.measure(self._cluster.comm)) if self._recorder is not None else trace.Offset(0, 0, 0)


class RecordGoodput(Hook):
    """Records what the time since the first start of the run went into; chief only.

    In every report, at the beginning, after the first step, which may be slow, and at the end of a learner, or of a
    run that was stopped or has no reports. What is printed at the end is what was recorded last.

    Args:
        restoring_s: Seconds that it has taken to restore the state.
        kept_steps: Returns the number of a learner's own steps whose work is kept; None for other runs.
    """

    def __init__(
        self, metrics: MetricsFile, path: Path, restoring_s: float, kept_steps: Callable[[], int] | None
    ) -> None:
        self._metrics, self._path, self._restoring_s, self._kept_steps = metrics, path, restoring_s, kept_steps

    def begin(self, loop: TrainingLoop) -> None:
        lines = read_lines(self._path)
        if self._kept_steps is not None:  # earlier versions recorded other steps than those of the learner
            lines = [line for line in lines if "step" in line.get(KEY, ())]
        self._earlier = accounts_in(lines)
        now, failed_at = time.time(), os.environ.get(FAILED_AT)
        started_at = float(os.environ.get(STARTED_AT, now - seconds_alive(os.getpid())))
        failed = (None, None) if failed_at is None else (float(failed_at), int(os.environ.get(FAILED_STEP, "0")))
        failed_step = failed[1] if self._kept_steps is None else None  # else it is one of all learners
        self._steps, self._lost_s = self._step(loop), 0.0
        opened_at = opened(self._earlier, self._steps, started_at, failed[0], now, failed_step)
        restoring_s = min(self._restoring_s, opened_at.seconds[START])
        self._idle = float(os.environ.get(IDLE_SHARE, "0"))
        starting_s = now - max([started_at, *(account.at for account in self._earlier[-1:])])
        more = {START: -restoring_s, "restoring": restoring_s, SPARES: self._idle * starting_s}
        self._account = opened_at.with_more(now, self._steps, more)
        self._compiled_s = compile_seconds()
        self._metrics.account = lambda: self._record(loop)
        loop.report(loop.step, {}, show=False)
        self._has_stepped = False

    def after_step(self, loop: TrainingLoop) -> None:
        if self._kept_steps is not None:
            before, self._steps = self._steps, self._kept_steps()
            if self._steps <= before:  # work of this learner was left out
                self._lost_s += (before + 1 - self._steps) * self._now(loop).seconds.get(STEPS, 0.0) / (before + 1)
        if not self._has_stepped:
            self._has_stepped = True
            loop.report(loop.step, {}, show=False)

    def end(self, loop: TrainingLoop) -> None:
        is_reported = loop.step >= loop.plan.train_steps and loop.plan.config.output.log_steps
        if not is_reported or self._kept_steps is not None:  # a learner may end between two reports
            loop.report(loop.step, {}, show=False)
        if self._earlier or self._recorded.at - self._recorded.since > _LONG_RUN_S:
            _log.info("%s", self._recorded.describe())

    def _record(self, loop: TrainingLoop) -> dict[str, dict[str, float]]:
        self._recorded = self._now(loop)
        return self._recorded.record()

    def _now(self, loop: TrainingLoop) -> Account:
        compiled_s = min(compile_seconds() - self._compiled_s, loop.training_s)
        waiting_s, now = min(loop.waiting_s, loop.training_s - compiled_s), time.time()
        steps_s, idle_s = loop.training_s - compiled_s - waiting_s, self._idle * (now - self._account.at)
        more = {"compilation": compiled_s, WAITING: waiting_s, STEPS: steps_s, SPARES: idle_s, **loop.paused_s}
        account = self._account.with_more(now, self._step(loop), more)
        return account.with_more(now, account.step, {STEPS: -self._lost_s, REPEATED: self._lost_s})

    def _step(self, loop: TrainingLoop) -> int:
        return loop.step if self._kept_steps is None else self._kept_steps()


class Histograms(Hook):
    """Adds histograms of parameters, and of this worker's gradient, to the TensorBoard events every N steps."""

    def __init__(self, every: int, events: Events) -> None:
        self._when, self._events = EveryNSteps(every), events

    def begin(self, loop: TrainingLoop) -> None:
        self._when.start(loop.step)

    def after_step(self, loop: TrainingLoop) -> None:
        if self._when.consume(loop.step):
            self._events.histograms(loop.step, "parameters", _trained(loop.plan.layout, loop.params, states=True))
            self._events.histograms(loop.step, "gradients", _trained(loop.plan.layout, loop.grads, states=False))


def _trained(layout: Layout, vector: Array, states: bool) -> dict[str, Array]:
    views = layout.views(vector)
    return {entry.name: views[entry.name] for entry in layout.entries if states or entry.kind == "param"}


def _restart(step: int) -> dict[str, float]:
    """Return the cost of restarts by ``mpitrain run``: their number, the steps to repeat, and seconds.

    Empty if this is the first start, or training has continued between the failure and this start.
    """
    failed_at, failed_step = os.environ.get(FAILED_AT), os.environ.get(FAILED_STEP)
    if failed_at is None:
        return {}
    repeated = {} if failed_step is None else {"repeated_steps": max(0, int(failed_step) - step)}
    seconds = round(time.time() - float(failed_at), 3)
    return {"restarts": int(os.environ.get(RESTARTS_SINCE, "1")), **repeated, "restart_s": seconds}
