"""The part of a worker in a training run."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..checkpoint.resume import ResumePlan
from ..comm.cluster import Cluster
from ..comm.mpi import MPI
from ..comm.shared_dataset import SharedDataset
from ..core.device import Device
from ..core.extra_state import ExtraState, HasExtraState
from ..core.kernels import compile_seconds
from ..core.layout import Array
from ..core.training_state import TrainingState
from ..data import BatchSource, InMemory, Loader, Split
from ..data.batch import Loading
from ..data.checks import check_examples
from ..data.loader import IndexLoader, own_buffers
from ..data.split import DatasetSplit, StoredExamples
from ..data.steps import Steps
from ..errors import CheckpointError, NonFiniteLoss, UserError
from ..gpu.compilation import compile_kernels
from ..models.accumulation import GradientAccumulation
from ..models.base import Model
from ..models.select import make_model
from ..monitor import worker_stats
from ..monitor.console import terminal_columns
from ..monitor.heartbeat import RunEnd
from ..monitor.trace import span
from ..plan.hook import Hook
from ..plan.job import Job
from ..plan.placement import ranges_of
from ..plan.plan import Plan
from ..process.rank_status import RankStatusFile
from ..process.signals import Signals, TimeLimit
from ..strategy.base import Strategy
from ..strategy.select import make_strategy
from .best import TrackBest
from .checkpointing import finish_saving, make_checkpoints
from .evaluation import Evaluator
from .hook_state import load_hooks, save_hooks
from .hooks import KeepFlushing, Log, ReportStep, Save, ShowProgress, Stop, Validate
from .loop import Loop, RunFiles
from .memory_recovery import KeepInMemory, kept_run_dir, make_state_writer
from .messages import describe_job, summary
from .restore import restore
from .slow_workers import ReportSlowWorker
from .telemetry import Telemetry

_log = logging.getLogger(__name__)
_WAIT = span("wait")


@dataclass
class Worker:
    """A worker of a run: everything it needs to train.

    Attributes:
        loop: The class of its training loop.
        script: The state of the script that trains, or None.
        end: How the run has ended.
    """

    cluster: Cluster
    job: Job
    plan: Plan
    files: RunFiles
    telemetry: Telemetry
    resume_plan: ResumePlan
    loop: type[Loop] = Loop
    script: HasExtraState | None = None
    end: RunEnd = RunEnd("failed")

    @contextlib.contextmanager
    def prepared(
        self, devices: Sequence[Device], signals: Signals, limit: TimeLimit, rank_status: RankStatusFile
    ) -> Iterator[Loop]:
        """Prepare to train; the block runs the loop. Afterwards, ``end`` is how the run ended.

        Collective over the workers, at the beginning and at the end.
        """
        cluster, job, plan, files = self.cluster, self.job, self.plan, self.files
        compile_kernels(cluster, devices, plan.dtype)
        state = TrainingState(plan.layout, job.network.frozen)
        strategy = make_strategy(cluster, plan, devices, state)
        run_dir = kept_run_dir(files.folder)
        beginning = restore(cluster, plan, job.network, self.resume_plan, strategy.initial_vectors, run_dir)
        with self._errors_of_workers():
            strategy.start(beginning.progress, beginning.extra_state)
        for why in beginning.skipped:
            _log.info("skipped checkpoint: %s", why)
        with cluster.training.agree("copying the model to its devices"):
            resident = devices[0].is_gpu and devices[0].owns(strategy.params)
            model = make_model(job, plan, devices, state, _sum_over(cluster.workers), resident)
        with self._errors_of_workers():
            model.load_extra_state(beginning.extra_state)
            load_hooks(job.hooks, beginning.extra_state)
            best = TrackBest(plan.config.training.goal, plan.config.training.patience, plan.config.saving.keep_best)
            best.load_extra_state(beginning.extra_state)
            if self.script is not None and beginning.resumed is not None:
                self.script.load_extra_state(beginning.extra_state)
        for namespace in sorted(beginning.extra_state.keys() - beginning.extra_state.used):
            _log.info("the checkpoint has the state %r, which this run does not use: it is dropped", namespace)
        threads = plan.config.device.threads or cluster.threads
        dataset = SharedDataset(cluster.training, plan.config.parallel.shared_memory, threads)
        loader = self._loader(dataset, "training", job.train_split, model)
        validation = None if job.validation_split is None else self._loader(dataset, "validation", job.validation_split)
        evaluator = None
        if validation is not None:
            evaluator = Evaluator(cluster.training, plan, strategy, model, job.network, job.metrics, validation)
        record = {} if files.record is None else files.record.tables
        checkpoints = make_checkpoints(cluster, plan, files.checkpoints, record)
        stop, config = Stop(strategy, signals, limit, checkpoints), plan.config
        save_steps, save_secs = config.saving.save_steps, config.saving.save_secs
        validate_steps, validate_secs = config.training.validate_steps, config.training.validate_secs
        if not beginning.is_complete(plan):  # else the run is only validated, and its records do not change
            for change in files.record.changes() if files.record is not None else ():
                _log.info("changed since the last start: %s", change)
            files.metrics = self.telemetry.open(files.record, beginning.progress.step)

        def extra_state() -> ExtraState:
            of_script = {} if self.script is None else self.script.extra_state()
            return {**model.extra_state(), **save_hooks(job.hooks), **best.extra_state(), **of_script}

        hooks: list[Hook] = [
            # A terminal shows every report, in one place.
            Log(
                config.output.log_steps,
                0.0 if terminal_columns() else config.output.log_secs,
                strategy,
                counts_examples=not isinstance(job.train_split, Steps),
            ),
            *([] if evaluator is None else [Validate(validate_steps, validate_secs, evaluator)]),
            best,
            Save(save_steps, save_secs, strategy, extra_state, checkpoints, beginning.saved, best.record),
            stop,
            ReportStep(rank_status),
            *([KeepFlushing()] if config.device.flush_denormals else []),
            *([ReportSlowWorker()] if strategy.synchronous and cluster.workers.size > 1 else []),
            *job.hooks,
            *self.telemetry.hooks(),
            *([] if files.console is None else [ShowProgress(files.console)]),
        ]
        accumulation = GradientAccumulation(model, strategy.grads, config.training.accumulate_steps)
        if run_dir is not None:
            writer = make_state_writer(cluster, plan, run_dir, strategy.synchronous, record)
            hooks.append(KeepInMemory(strategy, extra_state, writer))
        loop = self.loop(cluster, plan, strategy, model, accumulation, loader, files, hooks)
        self.telemetry.attach(loop, resumed=beginning.resumed is not None)
        _log.info("%s", describe_job(loop, job.train_split, beginning.resumed))
        began, first, compiled = time.perf_counter(), loop.step, compile_seconds()
        try:
            yield loop
        except NonFiniteLoss as error:
            if error.on_all_ranks:  # all ranks end regularly, so a sharded save in progress must be finished
                with contextlib.suppress(CheckpointError):  # already reported
                    finish_saving(checkpoints, cluster.training)
            raise
        finally:
            loader.close()
            if validation is not None:
                validation.close()
        seconds = time.perf_counter() - began
        if cluster.chief:
            self._account(strategy, model, loop.step, seconds)
        self.end = self._end(loop, stop.reason, loop.stop_reason)
        with _WAIT:
            compiling_s = cluster.workers.allreduce(compile_seconds() - compiled, op=MPI.MAX)
        _log.info("%s", summary(loop, job.train_split, files.folder, loop.step - first, seconds, compiling_s, self.end))
        with _WAIT:
            _end_servers(cluster)
        model.close()
        with _WAIT:
            self.loop.free(strategy.close)
            dataset.free()

    @contextlib.contextmanager
    def _errors_of_workers(self) -> Iterator[None]:
        """Declare that errors in the block, which all workers raise, are not those of servers. Local."""
        try:
            yield
        except UserError as error:
            error.on_all_ranks = error.on_all_ranks and not self.cluster.servers
            raise

    def _end(self, loop: Loop, stopped: str, finished: str | None) -> RunEnd:
        """Return how training ended. Collective over the workers, because each may have requested the end.

        Args:
            stopped: Why this worker has stopped the run, such as a signal; empty if it has not.
            finished: Why a hook of this worker has finished training early; None if none has.
        """
        with _WAIT:
            all_workers = self.cluster.workers.allgather((stopped, finished))
        if loop.step >= loop.train_steps:
            return RunEnd("finished")
        for reason, _ in all_workers:
            if reason:
                return RunEnd("stopped", reason)
        return RunEnd("finished early", next((reason for _, reason in all_workers if reason), "no more work"))

    def _loader(self, dataset: SharedDataset, name: str, split: Split, model: Model | None = None) -> BatchSource:
        """Return the batches of a split, in the form that the model prefers. Collective over the workers."""
        plan, seed = self.plan, self.plan.config.training.seed
        training = plan.config.training
        dtype = None if self.job.network.takes_integers(split) else plan.dtype
        check = partial(check_examples, name, split, dtype, self.job.network.classes)
        if isinstance(split, DatasetSplit) and isinstance(split.dataset, StoredExamples):
            arrays = split.dataset.split
            split = split.with_dataset(StoredExamples(arrays, dataset.load(arrays)))
        batch_dtype = None if model is not None and model.accepts_raw else dtype
        loading = Loading(
            training.data_workers or 0,
            training.prefetch or 2,
            self.cluster.workers.rank,
            self.cluster.workers.size,
            batch_dtype,
            check,
        )
        if (own := split.own_loader(seed, loading)) is not None:
            return own
        storage = dataset.load(split, check)
        if model is None:
            return Loader(split, storage, seed, dtype, reuse=self.loop.reuses_batches)
        memory = model.memory if plan.config.training.accumulate_steps == 1 else own_buffers
        loader = Loader(split, storage, seed, batch_dtype, memory, plan.step_examples, self.loop.reuses_batches)
        if not self.loop.reuses_batches or not isinstance(storage, InMemory):
            return loader
        examples, labels = storage.examples, storage.labels

        def cache() -> bool:
            if not model.has_room(examples, labels):
                return False
            model.cache_dataset(examples, labels)
            return True

        return IndexLoader(loader, cache)

    def _account(self, strategy: Strategy, model: Model, step: int, seconds: float) -> None:
        """Record the use of device memory, and in modes with servers what each worker and server did; chief only."""
        plan, cluster, metrics = self.plan, self.cluster, self.files.metrics
        if metrics is None:
            return
        memory = model.memory_use()
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
            held = [
                sum(hi - lo for lo, hi in ranges_of(plan.placements, server, plan.layout)) * plan.dtype.itemsize
                for server in range(plan.n_servers)
            ]
            server_hosts = [hosts[rank] for rank in cluster.servers]
            _log.info("%s", worker_stats.server_table(server_hosts, held, statistics, sizes))


def _sum_over(workers: MPI.Intracomm) -> Callable[[Array], None] | None:
    """Return a sum over the workers whose order does not depend on the MPI library; None for one worker.

    It has a communicator of its own, because the strategy's operations may be in progress. Collective over the workers.
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
