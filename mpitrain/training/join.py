"""A run that is one of several learners (``--join``): what its ranks do together; see ``strategy.learners``."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..checkpoint.digest import digest_of
from ..core import activity
from ..core.layout import Array
from ..core.words import one_line
from ..data.steps import Steps
from ..errors import CheckpointError, ConfigError, JobError, LaunchError
from ..monitor.run_record import CONFIG, RunRecord
from ..monitor.trace import span
from ..optim.whole_tensors import WholeTensorOptimizer
from ..plan.comparison import CODE, code_of, values_of
from ..plan.hook import Hook, TrainingLoop
from ..plan.job import Job
from ..plan.plan import Plan
from ..plan.progress import ConsistentPoint, Progress
from ..strategy.base import Strategy
from ..strategy.learners.learner import POLL_S, Group, Learner, News
from ..strategy.learners.ledger import Left, Ranges
from ..strategy.learners.store import Folder
from ..strategy.learners.synchronizer import LOST_S
from ..strategy.outer_optimizer import make_outer_optimizer
from ..strategy.sync import Sync
from ..strategy.sync_gpu import SyncGpu
from .common_run import CommonRun
from .hooks import Stop
from .loop import Loop
from .setup import Setup

_SHORTEST_PAUSE_S = 0.002  # while a range is being claimed
EXCHANGE = "exchange"  # reason of the requests for a consistent point
_FOLDER = "exchange"  # in the directory of the run that learners join
_log = logging.getLogger(__name__)


def check_join(setup: Setup) -> None:
    """Reject what cannot train as one of several learners.

    Raises:
        ConfigError: Something does not work with ``--join``.
    """
    job, plan = setup.job, setup.plan
    join, rule = plan.config.run.join, plan.optimizer
    for what, is_used in (
        (f"{job.train_split.source}, which can only be read in its order", job.train_split.is_stream),
        ("moving averages", plan.moving_average is not None),
        (f"the optimizer {rule.name}, which updates whole tensors", isinstance(rule, WholeTensorOptimizer)),
    ):
        if is_used:
            raise ConfigError(f"--join {join} does not work with {what}: remove --join, or change the job")


class Joined(Hook):
    """A learner's part in a run; construction is collective over the workers, after the strategy has started.

    The chief has the ``Learner``. When it has something to exchange, it requests a consistent point, at which all
    workers take over the new parameters.
    """

    def __init__(self, setup: Setup, strategy: Strategy, stop: Stop) -> None:
        cluster, plan = setup.cluster, setup.plan
        with cluster.training.agree("checking --join"):
            check_join(setup)
        if not isinstance(strategy, (Sync, SyncGpu)):
            raise JobError(f"--join does not work with --mode {plan.config.mode.name}", on_all_ranks=True)
        self._setup, self._cluster, self._plan, self._strategy, self._stop = setup, cluster, plan, strategy, stop
        device = setup.devices[0]
        # The GPU that has the strategy's vectors, if any; on the chief a copy of its parameters, while it is valid.
        self._copy: Array | None = None
        self._gpu: Any = device if device.is_gpu and device.owns(strategy.params) else None
        assert plan.config.run.join is not None
        self._run = plan.config.run.join
        self._learner: Learner | None = None
        self._ranges, self._has_ended = Ranges(), False
        self._trained = 0  # by all learners; see ``News``
        self._received = 0  # see ``Learner``
        self._unclaimed = 0  # examples that were trained since the last range, and not claimed
        self._common: CommonRun | None = None  # on the chief
        self._has_finished = False  # on the chief: whether the last work was sent
        self._stop_reason: Callable[[], str | None] = lambda: None  # see ``Loop``
        self._show: Callable[[], None] = lambda: None  # parameters that were taken over
        params, total = self._params(), 0
        with cluster.training.agree("joining the run"):
            if cluster.chief:
                self._learner = self._join(params)
                total = self._learner.total
        total = cluster.workers.bcast(total, root=0)
        plan.length.n_epochs, plan.length.steps = None, -(-total // plan.step_examples)
        self._apply(None if self._learner is None else self._news_of_all())
        self._continue(Progress(0, 0))

    def attach(self, loop: Loop) -> None:
        """Show common parameters to a loop from now on. Local."""
        loop.common, loop.measured, self._show = self.common, self.measured, loop.show_params
        self._stop_reason = lambda: loop.stop_reason

    def measured(self, step: int) -> float:
        """Return the number of this learner's steps that the common parameters contain. Local."""
        return self._received / self._plan.step_examples

    def common(self) -> Array:
        """Return the common parameters, shape (layout.size,). Collective over the workers."""
        values = np.empty(self._plan.layout.size, self._plan.dtype) if self._learner is None else self._learner.center
        self._cluster.workers.Bcast(values, root=0)
        return values

    def common_on_device(self) -> Array:
        """Return ``common`` in the memory of ``Strategy.params``. Collective over the workers."""
        values = self.common()
        if self._gpu is None:
            return values
        with self._gpu.activate():
            copy: Array = self._gpu.copy_of(values)
        return copy

    def kept_steps(self) -> int:
        """Return ``Learner.kept_steps``. Local; chief only."""
        assert self._learner is not None
        return self._learner.kept_steps

    def begin(self, loop: TrainingLoop) -> None:
        if self._common is not None:
            self._common.begin(loop)

    def after_step(self, loop: TrainingLoop) -> None:
        learner, common, self._copy = self._learner, self._common, None
        if learner is None or common is None:
            return
        learner.steps_done += 1
        learner.examples = self._ranges.trained(loop.data_cursor)
        common.update(loop)
        if learner.is_replaced:
            loop.stop()  # ``_finish`` raises the error on all ranks
        elif self._unclaimed >= learner.total:
            loop.stop("the folder of the learners could not be used for as many examples as the run has")
        elif learner.ended:
            loop.stop(learner.ended)
        elif learner.is_due:
            loop.request_pause(EXCHANGE)

    def at_consistent_point(self, loop: TrainingLoop, point: ConsistentPoint) -> None:
        if point.last and not self._has_ended:
            self._has_ended = True
            self._exchange(ends=True)
            reasons = self._cluster.workers.allgather(self._stop_reason())
            with self._cluster.training.agree("sending the last work"):
                if self._learner is not None and self._common is not None:
                    self._common.update(loop)
                    if self._unclaimed < self._learner.total:  # else the reason is the folder
                        self._learner.ended = next(filter(None, reasons), "")
                    with contextlib.suppress(OSError):  # then at the end, when this learner has saved its own state
                        self._finish(self._learner, patience_s=0.0)
            self._apply(None if self._learner is None else News([], [], False, Left.NONE, self._trained))
        elif EXCHANGE in point.reasons and not self._has_ended:
            self._exchange(ends=False)
        if self._common is not None:
            self._common.at_consistent_point(point)
        if not point.last:
            self._continue(Progress(point.step, point.data_cursor))

    def end(self, loop: TrainingLoop) -> None:
        with self._cluster.training.agree("ending as a learner"):
            if self._learner is not None and self._common is not None and not self._has_finished:
                self._common.update(loop)  # the last validation is one of the model before the last work
                try:
                    self._finish(self._learner)
                except OSError as error:
                    raise CheckpointError(
                        f"--join {self._run}: the last work of this learner could not be sent: "
                        f"{error.strerror or error}; its own parameters are in {self._setup.files.folder}"
                    ) from error
            if self._common is not None:
                self._common.end(loop)
        # Code of a script after its loop has the common parameters.
        learner = self._learner
        self._apply(None if learner is None else News(learner.all_fragments(), [], False, Left.NONE, 0))

    def _finish(self, learner: Learner, patience_s: float = LOST_S) -> None:
        """Send the last work; afterwards ``common`` is the newest common model. Local; chief only.

        Raises:
            LaunchError: Another process has replaced this one.
            OSError: As for ``Learner.finish``.
        """
        assert self._common is not None
        is_last = learner.finish(self._common.save, patience_s)
        if learner.is_replaced:  # this process must not write to the directory any more
            raise LaunchError("another process trains this learner now; this one has ended without saving")
        self._common.finish(is_last)
        self._has_finished = True

    @property
    def is_replaced(self) -> bool:
        """Whether another process trains this learner now; False except on the chief."""
        return self._learner is not None and self._learner.is_replaced

    def close(self) -> None:
        """End the threads of this learner, also after an error. Local."""
        if self._learner is not None and self._common is not None:
            self._learner.abandon()
            self._common.close()

    def _join(self, params: Array) -> Learner:
        """Join the run, or begin it with these parameters. Local; chief only."""
        setup, plan, run = self._setup, self._plan, self._run
        parallel, length = plan.config.parallel, plan.length
        total = plan.train_steps * plan.step_examples
        if length.n_epochs is not None:
            total = length.n_epochs * len(setup.job.train_split)
        process = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        try:
            if (run / CONFIG).exists() and not (run / _FOLDER).exists():
                raise ConfigError(
                    f"--join {run} is the directory of a run, but has no folder {_FOLDER}, in which learners meet: "
                    f"give another one, and --init-from {run} to begin with its parameters"
                )
            group = Group(
                Folder(run / _FOLDER),
                plan.layout,
                plan.dtype,
                make_outer_optimizer(parallel),
                parallel.n_fragments,
                _facts(setup.job, plan),
                total,
            )
            learner = Learner(group, setup.files.folder.name, process, parallel.steps_per_exchange, plan.step_examples)
            learner.join(params)
            assert setup.files.record is not None
            record = RunRecord(run, setup.files.record.tables, setup.request.job_file, setup.ranks)
            self._common = CommonRun(run, plan, record, learner)
            requested = total if length.n_epochs is not None else plan.train_steps * learner.unit
            if requested != learner.total:
                _log.info(
                    "the run has %s examples, as its first learner has requested, not %s; to train more, --join "
                    "another directory, with --init-from %s",
                    f"{learner.total:,}",
                    f"{requested:,}",
                    run,
                )
        except OSError as error:
            raise ConfigError(
                f"--join {run}: the folder cannot be used: {one_line(error)}; repair it, or give another one, and "
                f"--init-from {run} to begin with its parameters"
            ) from error
        return learner

    def _news_of_all(self) -> News:
        """Return the common parameters as news, and the first range."""
        assert self._learner is not None
        news = self._learner.exchange(self._learner.center)
        return news._replace(fragments=self._learner.all_fragments())

    @span("average")
    def _exchange(self, ends: bool) -> None:
        params = self._params()
        self._apply(None if self._learner is None else self._learner.exchange(params, ends))

    def _params(self) -> Array:
        """Return the parameters, on the chief in host memory. Collective over the workers."""
        params = self._strategy.vector("params")
        if self._gpu is None or not self._cluster.chief:
            return params
        if self._copy is None:
            self._copy = self._gpu.to_host(params)
        return self._copy

    def _apply(self, news: News | None) -> None:
        """Take over the news of the chief. Collective over the workers."""
        comm = self._cluster.workers
        if news is not None:
            places = [(each.lo, each.hi) for each, _ in news.fragments]
            received = 0 if self._learner is None else self._learner.received
            plain = places, news.ranges, news.is_reset, news.left, news.trained, received
        else:
            plain = [], [], False, Left.SOME, 0, 0
        places, ranges, is_reset, left, self._trained, self._received = comm.bcast(plain, root=0)
        parts = []
        for number, (lo, hi) in enumerate(places):
            values = np.empty(hi - lo, self._plan.dtype) if news is None else news.fragments[number][1]
            comm.Bcast(values, root=0)
            parts.append((lo, values))
        if parts:
            self._copy = None
            self._strategy.set_params(parts)
            self._show()
        self._ranges.update(ranges, is_reset, left)

    def _continue(self, progress: Progress) -> None:
        """Go on with the next range if this one has ended. Without a next one, go on behind this one.

        The step is that of the run, on which schedules depend: learners that begin together begin with the first steps.
        Nothing is waited for if training must stop: then the next step is the last one.
        """
        plan, strategy, cursor = self._plan, self._strategy, progress.data_cursor
        if self._ranges.is_at_end(cursor):
            self._exchange(ends=False)
        pause_s = _SHORTEST_PAUSE_S
        while self._ranges.must_wait(cursor) and not self._must_stop(progress.step):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S)
            activity.mark_progress()
            self._exchange(ends=False)
        if self._ranges.take_next(cursor):
            self._unclaimed, cursor = 0, self._ranges.current[0]
        elif self._ranges.has_ended(cursor):
            # Others may train on: this learner ends with the steps that were taken so far.
            plan.length.steps = min(plan.train_steps, max(1, progress.step, -(-self._trained // plan.step_examples)))
            strategy.move_to(Progress(plan.train_steps, cursor))
            return
        elif cursor > self._ranges.current[1] or self._ranges.must_wait(cursor):
            # Steps on examples that it has not claimed do not count.
            self._unclaimed += plan.step_examples
            strategy.move_to(Progress(max(0, progress.step - 1), cursor))
            return
        left = max(1, (self._ranges.current[1] - cursor) // plan.step_examples)
        # The last step is reached when no examples are left, not before.
        step = min(max(progress.step, self._trained // plan.step_examples), plan.train_steps - 1 - left)
        strategy.move_to(Progress(max(0, step), cursor))

    def _must_stop(self, step: int) -> bool:
        """Return whether a worker has been asked to stop, or this process must end. Collective over the workers."""
        cluster, learner = self._cluster, self._learner
        must_end = learner is not None and bool(learner.is_replaced or learner.ended)
        return any(cluster.workers.allgather(self._stop.look(cluster.chief, step) or must_end))


def _facts(job: Job, plan: Plan) -> Mapping[str, Any]:
    """Return what all learners of a run must have in common."""
    parallel, of_job = plan.config.parallel, job.facts()
    if isinstance(job.train_split, Steps):  # these are positions: their number depends on the number of workers
        del of_job["number of training examples"]
    rates = [job.rule.learning_rate, *(group.get("learning_rate") for group in job.rule.groups.values())]
    # Those of a Trainer (``GroupRate``), whose text does not have them.
    initial = [f"{rate.initial:.6g}" for rate in dict.fromkeys(rates) if rate is not None and hasattr(rate, "initial")]
    return {
        "model": digest_of(plan.layout.digests().tobytes()),
        **{name: str(value) for name, value in of_job.items()},
        "loss": values_of(job.loss),
        "learning rates": ", ".join(initial),
        CODE: code_of(job.loss),
        "--dtype": plan.config.training.dtype,
        "--seed": plan.config.training.seed,
        "--fragments": parallel.n_fragments,
        "outer optimizer": repr(make_outer_optimizer(parallel)),
    }
