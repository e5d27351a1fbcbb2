"""A worker's part of a training run."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..comm.cluster import Cluster
from ..comm.mpi import MPI
from ..core.extra_state import HasExtraState
from ..core.kernels import compile_seconds
from ..core.layout import Array
from ..core.training_state import TrainingState
from ..data.steps import Steps
from ..errors import CheckpointError, UserError
from ..gpu.compilation import compile_kernels
from ..models.accumulation import GradientAccumulation
from ..models.base import Model
from ..models.select import make_model
from ..monitor import worker_stats
from ..monitor.console import terminal_columns
from ..monitor.heartbeat import RunEnd
from ..monitor.trace import span
from ..plan.hook import Hook
from ..plan.placement import ranges_of
from ..process.rank_status import RUN_DIR_VARIABLE, RankStatusFile
from ..process.signals import Signals, TimeLimit
from ..strategy.select import make_strategy
from .batches import Batches
from .best import TrackBest
from .checkpointing import finish_saving, make_checkpoints
from .evaluation import Evaluator
from .hook_state import HookState
from .hooks import KeepFlushing, Log, ReportStep, Save, ShowProgress, Stop, Validate
from .join import Joined
from .memory_recovery import KeepInMemory, kept_run_dir, make_state_writer
from .messages import describe_job, summary
from .restore import Beginning, restore
from .run_state import RunState
from .setup import Setup
from .slow_workers import ReportSlowWorker
from .telemetry import Telemetry

_log = logging.getLogger(__name__)
_WAIT = span("wait")


class Worker:
    """The objects that a worker of a run needs to train.

    Construction is collective over the workers, and in modes with servers over all ranks.

    Attributes:
        loop: The training loop.
    """

    def __init__(
        self, setup: Setup, telemetry: Telemetry, signals: Signals, limit: TimeLimit, rank_status: RankStatusFile
    ) -> None:
        cluster, job, plan, request = setup.cluster, setup.job, setup.plan, setup.request
        self._setup, self._telemetry = setup, telemetry
        compile_kernels(cluster, setup.devices, plan.dtype)
        training_state = TrainingState(plan.layout, job.network.frozen)
        self._strategy = make_strategy(cluster, plan, setup.devices, training_state)
        began = time.perf_counter()
        beginning = self._restore()
        restoring_s = time.perf_counter() - began
        self._checkpoints = make_checkpoints(cluster, plan, setup.files.checkpoints, self._record)
        looks_in = None if RUN_DIR_VARIABLE in os.environ else setup.files.folder
        self._stop = Stop(self._strategy, signals, limit, self._checkpoints, looks_in)
        self._joined = None if plan.config.run.join is None else Joined(setup, self._strategy, self._stop)
        self._model = self._make_model(training_state)
        keeps_best = plan.config.saving.keep_best and self._joined is None  # else the common model's are kept
        best = TrackBest(plan.config.training.goal, plan.config.training.patience, keeps_best)
        parts: list[HasExtraState] = [self._model, HookState(job.hooks), best]
        state = RunState(self._strategy, parts if request.script is None else [*parts, request.script])
        if beginning.resumed is not None:
            with self._errors_of_workers():
                state.load(beginning.extra_state)
        self._batches = Batches(setup, self._model)
        self._open_files(beginning)
        kept_steps = None if self._joined is None else self._joined.kept_steps
        hooks = [*self._hooks(state, best, beginning, rank_status), *telemetry.hooks(restoring_s, kept_steps)]
        additions = plan.share_of(cluster.workers.rank).additions
        sums, sums_losses = self._strategy.sums or [self._strategy.grads], self._strategy.sums_losses
        rounds_losses = plan.config.virtual_workers is not None and not sums_losses
        accumulation = GradientAccumulation(self._model, sums, additions, rounds_losses, sums_losses)
        self.loop = request.loop(
            cluster, plan, self._strategy, self._model, accumulation, self._batches.training, setup.files, hooks
        )
        if self._joined is not None:
            self._joined.attach(self.loop)
        telemetry.attach(self.loop, resumed=beginning.resumed is not None)
        _log.info("%s", describe_job(self.loop, job.train_split, beginning.resumed))
        self._began, self._compiled_s = time.perf_counter(), compile_seconds()
        self._first_step = self._step_alone()

    def _step_alone(self) -> int:
        """Return the step without those that other learners have taken; on the chief. Local."""
        return self.loop.step - (self._strategy.stats().moved if self._setup.cluster.chief else 0)

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is on disk, or its save has failed. Collective over the workers."""
        with contextlib.suppress(CheckpointError):  # already reported
            finish_saving(self._checkpoints, self._setup.cluster.training)

    def close(self) -> None:
        """End the processes that load examples, and the threads of a learner, also after an error. Local."""
        self._batches.close()
        if self._joined is not None:
            self._joined.close()
            if self._joined.is_replaced:
                self._telemetry.abandon()

    def finish(self) -> RunEnd:
        """Report and return how training ended; free memory. Collective over all ranks."""
        cluster, files, loop = self._setup.cluster, self._setup.files, self.loop
        seconds = time.perf_counter() - self._began
        if cluster.chief:
            self._record_statistics(seconds)
        end = self._end()
        with _WAIT:
            compiling_s = cluster.workers.allreduce(compile_seconds() - self._compiled_s, op=MPI.MAX)
        steps = self._step_alone() - self._first_step
        split = self._setup.job.train_split
        _log.info("%s", summary(loop, split, files.folder, steps, seconds, compiling_s, end))
        with _WAIT:
            _end_servers(cluster)
        self._model.close()
        with _WAIT:
            loop.free(self._strategy.close)
            self._batches.free()
        return end

    @property
    def _record(self) -> Mapping[str, Mapping[str, Any]]:
        """The tables of options, arguments and versions, which checkpoints contain; empty except on the chief."""
        return {} if self._setup.files.record is None else self._setup.files.record.tables

    def _restore(self) -> Beginning:
        """Fill the strategy's vectors, and start the strategy."""
        setup, strategy = self._setup, self._strategy
        run_dir = kept_run_dir(setup.files.folder)
        beginning = restore(
            setup.cluster,
            setup.plan,
            setup.job.network,
            setup.resume_plan,
            strategy.initial_vectors,
            strategy.shared_vectors,
            run_dir,
        )
        with self._errors_of_workers():
            strategy.start(beginning.progress, beginning.extra_state)
        for why in beginning.skipped:
            _log.info("skipped checkpoint: %s", why)
        is_learner = setup.plan.config.run.join is not None  # continues from the common parameters
        if beginning.resumed is None and setup.resume_plan.lost_step and not is_learner:
            saving = setup.plan.config.saving
            _log.info(
                "training starts again at step 1: the last start reached step %s or later, but no checkpoint exists%s",
                f"{setup.resume_plan.lost_step:,}",
                "" if saving.save_secs or saving.save_steps else "; --save-secs and --save-steps save while training",
            )
        return beginning

    def _make_model(self, state: TrainingState) -> Model:
        cluster, devices = self._setup.cluster, self._setup.devices
        with cluster.training.agree("copying the model to its devices"):
            resident = devices[0].is_gpu and devices[0].owns(self._strategy.params)
            return make_model(self._setup.job, self._setup.plan, devices, state, _sum_over(cluster.workers), resident)

    def _open_files(self, beginning: Beginning) -> None:
        """Open the files of the run, unless the run was complete before, so that its records do not change."""
        files = self._setup.files
        if not beginning.is_complete(self._setup.plan):
            for change in files.record.changes() if files.record is not None else ():
                _log.info("changed since the last start: %s", change)
            files.metrics = self._telemetry.open(files.record, beginning.progress.step)

    def _hooks(self, state: RunState, best: TrackBest, beginning: Beginning, rank_status: RankStatusFile) -> list[Hook]:
        """Return the hooks in the order in which the loop calls them. Local."""
        cluster, job, plan = self._setup.cluster, self._setup.job, self._setup.plan
        strategy, config, console = self._strategy, plan.config, self._setup.files.console
        # On a terminal every report is shown, because it updates the progress bar and takes no further line.
        print_every_s = 0.0 if terminal_columns() else config.output.log_secs
        counts_examples = not isinstance(job.train_split, Steps)
        hooks: list[Hook] = [] if self._joined is None else [self._joined]
        hooks.append(Log(config.output.log_steps, print_every_s, strategy, counts_examples))
        if self._batches.validation is not None:
            validation, joined = self._batches.validation, self._joined
            vector = strategy.vector if joined is None else lambda name: joined.common_on_device()
            evaluator = Evaluator(
                cluster.training, plan, strategy, self._model, job.network, job.metrics, validation, vector
            )
            measured = float if joined is None else joined.measured
            hooks.append(Validate(config.training.validate_steps, config.training.validate_secs, evaluator, measured))
        every, every_s = config.saving.save_steps, config.saving.save_secs
        hooks += [
            best,
            Save(every, every_s, state, self._checkpoints, beginning.saved, best.record),
            self._stop,
            ReportStep(rank_status),
        ]
        if config.device.flush_denormals:
            hooks.append(KeepFlushing())
        if strategy.synchronous and cluster.workers.size > 1:
            hooks.append(ReportSlowWorker(strategy))
        hooks += job.hooks
        if console is not None:
            hooks.append(ShowProgress(console))
        run_dir = kept_run_dir(self._setup.files.folder)
        if run_dir is not None:
            writer = make_state_writer(cluster, plan, run_dir, strategy.synchronous, self._record)
            hooks.append(KeepInMemory(state, writer))
        return hooks

    @contextlib.contextmanager
    def _errors_of_workers(self) -> Iterator[None]:
        """With servers, mark user errors in the block as not raised on all ranks: servers do not raise them. Local."""
        try:
            yield
        except UserError as error:
            error.on_all_ranks = error.on_all_ranks and not self._setup.cluster.servers
            raise

    def _end(self) -> RunEnd:
        """Return how training ended. Collective over the workers, because any of them may have requested the end."""
        loop = self.loop
        with _WAIT:
            all_workers = self._setup.cluster.workers.allgather((self._stop.reason, loop.stop_reason))
        if loop.step >= loop.train_steps:
            return RunEnd("finished")
        for reason, _ in all_workers:
            if reason:
                return RunEnd("stopped", reason)
        return RunEnd("finished early", next((reason for _, reason in all_workers if reason), "no more work"))

    def _record_statistics(self, seconds: float) -> None:
        """Record the use of device memory, and with servers the statistics of workers and servers; chief only."""
        plan, cluster, metrics = self._setup.plan, self._setup.cluster, self._setup.files.metrics
        step, strategy = self.loop.step, self._strategy
        if metrics is None:
            return
        memory = self._model.memory_use()
        if memory:
            metrics.write(step, seconds, {"device_memory": {**strategy.memory_use(), **memory}})
        stats = strategy.stats()
        statistics, sizes = stats.workers, stats.gradient_nbytes
        if not statistics:
            return
        moved = worker_stats.moved(statistics, plan.nbytes, sizes)
        metrics.write(step, seconds, worker_stats.as_json(statistics, plan.batch, moved, seconds))
        hosts = cluster.host_of
        names = [hosts[rank] for rank in cluster.worker_ranks]
        _log.info("%s", worker_stats.table(statistics, names, plan.batch, moved, seconds))
        if cluster.servers:
            nbytes = [
                sum(hi - lo for lo, hi in ranges_of(plan.placements, server, plan.layout)) * plan.dtype.itemsize
                for server in range(plan.n_servers)
            ]
            server_hosts = [hosts[rank] for rank in cluster.servers]
            _log.info("%s", worker_stats.server_table(server_hosts, nbytes, statistics, sizes))


def _sum_over(workers: MPI.Intracomm) -> Callable[[Array], None] | None:
    """Return a function that sums over the workers in an order independent of the MPI library; None for one worker.

    The function has its own communicator, because operations of the strategy may be in progress. Collective over the
    workers.
    """
    if workers.size == 1:
        return None
    workers = workers.Dup()

    def sum_over_workers(array: Array) -> None:
        all_workers = np.empty((workers.size, *array.shape), array.dtype)
        workers.Allgather(np.ascontiguousarray(array), all_workers)
        np.sum(all_workers, axis=0, out=array)

    return sum_over_workers


def _end_servers(cluster: Cluster) -> None:
    """Enter the barrier that servers poll. Collective over all ranks."""
    if cluster.servers:
        barrier = cluster.comm.Ibarrier()
        while not barrier.Test():
            time.sleep(100e-6)
