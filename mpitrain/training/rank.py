"""One rank of a training run, from start to exit."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from threadpoolctl import threadpool_limits

from ..checkpoint.resume import ResumePlan, plan_resume
from ..comm.cluster import Cluster, OtherRankFailed, report_crash
from ..comm.mpi import MPI, library_name
from ..comm.shared_dataset import SharedDataset
from ..core import activity
from ..core.device import Device
from ..core.kernels import compile_seconds
from ..core.layout import Array
from ..data import BatchSource, Loader, Split
from ..data.loader import Memory, own_buffers
from ..data.split import check_conversion
from ..errors import CheckpointError, ConfigError, NonFiniteLoss, UserError
from ..gpu.discovery import choose_devices
from ..models.base import Model
from ..models.select import make_model
from ..monitor import heartbeat, worker_stats
from ..monitor.console import Console, describe, terminal_columns
from ..monitor.format import format_table
from ..monitor.heartbeat import RunEnd
from ..monitor.rank_log import show_warnings
from ..monitor.trace import span
from ..nn.layer import Layer
from ..plan.config import RunConfig, plain
from ..plan.hook import Hook
from ..plan.job import Job, errors_located
from ..plan.placement import ranges_of
from ..plan.plan import Plan, make_plan
from ..plan.progress import ExtraState
from ..plan.roles import HOW_ROLES_ARE_GIVEN
from ..process.launcher_env import is_launched, launched_rank
from ..process.output_prefix import set_output_prefix
from ..process.rank_status import RUN_DIR_VARIABLE, RankStatusFile
from ..process.reaper import become_reaper
from ..process.run_directory import cannot_write, check_files, new_run_dir
from ..process.signals import STOPPED_EARLY, Signals, TimeLimit, ask_slurm, end_of_time
from ..strategy.base import Strategy
from ..strategy.bulk_synchronous import BulkSynchronous
from ..strategy.ps.server import Server
from ..strategy.ps.store import Store
from ..strategy.select import make_strategy, trains_on_gpus
from ..strategy.sync_gpu import SyncGpu
from .checkpointing import finish_saving, make_checkpoints
from .evaluation import Evaluator
from .hook_state import load_hooks, save_hooks
from .hooks import Log, ReportStep, Save, ShowProgress, Stop, Validate
from .initial_state import InitialStateLoader
from .loop import Loop, RunFiles
from .placement_report import placement_report
from .run_record import RunRecord
from .slow_workers import ReportSlowWorker
from .telemetry import Telemetry
from .versions import versions

_log = logging.getLogger(__name__)
_WAIT = span("wait")
_SHORT_S = 0.05  # shorter compilations are not reported
_BEFORE_REPORT_S = 0.5  # for each of up to four lower ranks
_RANK_COLUMNS = ("rank", "host", "role", "task", "device")
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class TrainRequest:
    """The training that a rank performs.

    Attributes:
        job_file: Its path.
        arguments: The job function's arguments, for the record.
        config: The run's options as the user gave them.
        make: Makes the job; may fail on one rank only.
    """

    job_file: Path
    arguments: dict[str, Any]
    config: RunConfig
    make: Callable[[], Job]

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job_file.stem


def run_rank(parse: Callable[[], TrainRequest]) -> NoReturn:
    """Train on this rank, and exit with the status of the run.

    Collective over all ranks. A user's error is printed by one rank, in one line, and every rank exits with status 2.
    After an unexpected exception, the rank that raised it ends all ranks with status 1. A run that was stopped before
    its last step, and has saved, exits with status 75.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank immediately, without a traceback
    cluster, status = None, 0
    rank_status = _register_rank()
    try:
        cluster = Cluster()
        show_warnings(cluster.rank == 0 or RUN_DIR_VARIABLE in os.environ)  # ``mpitrain run`` removes duplicates
        with cluster.agree("reading the command line and the job file"):
            request = parse()
        if _train(cluster, request, rank_status):
            status = STOPPED_EARLY
    except UserError as error:
        rank_status.set_failed(error, mistake=True)
        _end(cluster, error)
    except OtherRankFailed:
        time.sleep(5)  # the other rank prints its traceback, then ends this one
        sys.exit(1)
    except BaseException as error:
        rank_status.set_failed(error, mistake=False)
        _let_lower_ranks_report(cluster)
        print(report_crash(cluster, error), file=sys.__stderr__, flush=True)
        if cluster is not None and cluster.size > 1:
            cluster.abort(1)
        sys.exit(1)
    rank_status.set_done(stopped=status == STOPPED_EARLY)
    sys.stdout.flush()
    with _WAIT:
        cluster.comm.Barrier()  # a launcher may kill the other ranks as soon as one exits with a nonzero status
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the launcher may send these while MPI finalizes
    sys.exit(status)


def _end(cluster: Cluster | None, error: UserError) -> NoReturn:
    """Print a user's error once, and exit: regularly if every rank has it, else by aborting the other ranks."""
    if cluster is None or error.on_all_ranks or cluster.size == 1:
        if (launched_rank(os.environ) if cluster is None else cluster.rank) == 0:
            print(f"mpitrain: {error}", file=sys.__stderr__, flush=True)
        elif cluster is None:
            time.sleep(3)  # a launcher kills all ranks when one exits; leave time for rank 0 to print
    else:
        _let_lower_ranks_report(cluster)
        print(f"mpitrain: {error} ({cluster.rank_description})", file=sys.__stderr__, flush=True)
        cluster.abort(error.exit_status)
    sys.exit(error.exit_status)


def _let_lower_ranks_report(cluster: Cluster | None) -> None:
    """Wait before an error is reported: if all ranks fail in the same way, the lowest one ends the others meanwhile."""
    time.sleep(0.0 if cluster is None else _BEFORE_REPORT_S * min(cluster.rank, 4))


def _train(cluster: Cluster, request: TrainRequest, rank_status: RankStatusFile) -> bool:
    """Train. Return whether the run was asked to stop early; the same on every rank."""
    config = request.config
    cluster.assign(config)
    rank_status.set_role(cluster.role, cluster.task_index)
    activity.set_limits(config.run.hang_timeout, config.run.long_timeout)
    if RUN_DIR_VARIABLE in os.environ:
        set_output_prefix(None if cluster.chief else cluster.rank)
    devices, notes = choose_devices(cluster, config)
    threads = _limit_threads(cluster, config.device.threads, len(devices))
    with cluster.agree("making the job"):
        job = request.make()
        config = config.merged({"batch_size": job.batch_size, "train_steps": job.train_steps})
        with errors_located(request.job_file, job):
            plan = make_plan(job, config, len(cluster.worker_ranks))
            facts = {**config.as_toml(), **job.facts()}
        _limit_threads_of_torch(threads)
    cluster.check_same(facts)
    cluster.check_layout(plan.layout)
    _check_devices(cluster, config, job, devices)
    ranks = format_table(_RANK_COLUMNS, cluster.table(" ".join(device.name for device in devices)))
    files, resume_plan = RunFiles(Path()), ResumePlan()
    with cluster.agree("reading the run directory"):
        if cluster.chief:
            files = _find_files(request, config, ranks)
            resume_plan = plan_resume(config, files.checkpoints, plan.layout)
            finished = resume_plan.auto and bool(resume_plan.resume) and _has_finished_early(files.folder)
            resume_plan = resume_plan._replace(finished=finished)
    resume_plan, files.folder = cluster.comm.bcast((resume_plan, files.folder), root=cluster.chief_rank)
    if resume_plan.finished:
        return False
    activity.describe(role=f"{cluster.role} {cluster.task_index}", run_dir=str(files.folder.absolute()))
    signals = Signals()
    signals.install()  # stays installed: a signal after training must not interrupt the regular exit
    rank_status.set_ready()
    telemetry, end = Telemetry(cluster, config, files.folder, files.console), RunEnd("failed")
    try:
        resident = trains_on_gpus(cluster, plan, devices)
        if cluster.chief:
            if config.output.log_device_placement:
                _log.info("%s\n%s", ranks, placement_report(job.network, plan, devices, resident))
            _log.info("%s", _headline(cluster, request.name, config, threads, devices))
            if "TF_CONFIG" in os.environ:
                notes = [*notes, f"TF_CONFIG is not used. {HOW_ROLES_ARE_GIVEN}"]
            for note in [*notes, *resume_plan.notes, *_notes_on_data(job)]:
                _log.info("%s", note)
        if cluster.is_server:
            _serve(cluster, job, plan, resume_plan, telemetry)
            end = RunEnd("finished")
        else:
            # Only the chief's clock counts, so only the chief queries Slurm.
            until = end_of_time(plan.config.run.time_limit, ask=ask_slurm) if cluster.chief else None
            run = _Run(cluster, job, plan, files, telemetry, resume_plan)
            with errors_located(request.job_file, job):
                end = run.work(devices, signals, TimeLimit(until, time.time()), rank_status)
        telemetry.write_trace()
    finally:
        if files.console is not None:
            files.console.stop()
        telemetry.close(end, sys.exc_info()[1])
    return cluster.any(end.state == "stopped")


def _serve(cluster: Cluster, job: Job, plan: Plan, resume_plan: ResumePlan, telemetry: Telemetry) -> None:
    """Run a parameter server."""
    initial_state = InitialStateLoader(cluster, plan, job.network, resume_plan)
    store = Store(cluster, plan, initial_state)
    if not initial_state.nothing_to_train:
        telemetry.open(None, 0)
    activity.become("wait")  # between requests
    Server(store).serve()  # ends when the workers report that they have saved, also after a signal
    activity.become("end")
    with _WAIT:
        store.free()


@dataclass
class _Run:
    """What a worker needs to train."""

    cluster: Cluster
    job: Job
    plan: Plan
    files: RunFiles
    telemetry: Telemetry
    resume_plan: ResumePlan

    def work(
        self, devices: Sequence[Device], signals: Signals, limit: TimeLimit, rank_status: RankStatusFile
    ) -> RunEnd:
        """Train; return how the run ended."""
        cluster, job, plan, files = self.cluster, self.job, self.plan, self.files
        initial_state = InitialStateLoader(cluster, plan, job.network, self.resume_plan)
        strategy = make_strategy(cluster, plan, devices, initial_state)
        for why in initial_state.skipped:
            _log.info("skipped checkpoint: %s", why)
        with cluster.training.agree("copying the model to its devices"):
            model = make_model(job, plan, devices, _sum_over(cluster.workers))
        model.load_extra_state(initial_state.extra_state)
        load_hooks(job.hooks, initial_state.extra_state)
        dataset = SharedDataset(cluster.training, plan.config.parallel.shared_memory)
        loader = self._loader(dataset, "training", job.train_split, model.accepts_raw, model.memory)
        validation = None if job.validation_split is None else self._loader(dataset, "validation", job.validation_split)
        evaluator = None if validation is None else Evaluator(cluster, plan, strategy, model, validation)
        record = {} if files.record is None else files.record.tables
        checkpoints = make_checkpoints(cluster, plan, files.checkpoints, record)
        stop, config = Stop(strategy, signals, limit, checkpoints), plan.config
        save_steps, save_secs = config.saving.save_steps, config.saving.save_secs
        if not initial_state.nothing_to_train:  # else the run is only validated, and its records do not change
            for change in files.record.changes() if files.record is not None else ():
                _log.info("changed since the last start: %s", change)
            files.metrics = self.telemetry.open(files.record, initial_state.step)

        def extra_state() -> ExtraState:
            return {**model.extra_state, **save_hooks(job.hooks)}

        hooks: list[Hook] = [
            # A terminal shows every report, in one place.
            Log(config.output.log_steps, 0.0 if terminal_columns() else config.output.log_secs, strategy),
            Validate(config.training.validate_steps, evaluator),
            Save(save_steps, save_secs, strategy, extra_state, checkpoints, initial_state.saved),
            stop,
            ReportStep(rank_status),
            *(
                [ReportSlowWorker(strategy)]
                if isinstance(strategy, BulkSynchronous) and cluster.workers.size > 1
                else []
            ),
            *job.hooks,
            *self.telemetry.hooks(),
            *([] if files.console is None else [ShowProgress(files.console)]),
        ]
        loop = Loop(cluster, plan, strategy, model, loader, files, hooks)
        self.telemetry.attach(loop, resumed=initial_state.resumed is not None)
        _log.info("%s", _describe_job(loop, len(job.train_split), initial_state.resumed))
        began, first, compiled = time.perf_counter(), loop.step, compile_seconds()
        try:
            reason = loop.run()
        except NonFiniteLoss as error:
            if error.on_all_ranks:  # all ranks end regularly, so a sharded save in progress must be finished
                with contextlib.suppress(CheckpointError):  # already reported
                    finish_saving(checkpoints, cluster.training)
            raise
        seconds = time.perf_counter() - began
        if cluster.chief:
            self._account(strategy, model, loop.step, seconds)
        end = self._end(loop, stop.reason, reason)
        with _WAIT:
            compiling_s = cluster.workers.allreduce(compile_seconds() - compiled, op=MPI.MAX)
        _log.info("%s", _summary(loop, files.folder, loop.step - first, seconds, compiling_s, end))
        with _WAIT:
            _end_servers(cluster)
        model.close()
        loader.close()
        if validation is not None:
            validation.close()
        with _WAIT:
            strategy.close()
            dataset.free()
        return end

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

    def _loader(
        self, dataset: SharedDataset, name: str, split: Split, raw: bool = False, memory: Memory = own_buffers
    ) -> BatchSource:
        """Return the batches of a split; in the stored type if ``raw``. Collective over the workers."""
        plan, seed = self.plan, self.plan.config.training.seed
        if (own := split.own_loader(seed)) is not None:
            return own
        dtype = None if self.job.network.takes_integers(split) else plan.dtype
        storage = dataset.load(split, partial(check_conversion, name, split, dtype))
        return Loader(split, storage, seed, None if raw else dtype, memory, plan.step_examples)

    def _account(self, strategy: Strategy, model: Model, step: int, seconds: float) -> None:
        """Record the use of device memory, and in the served modes what each worker and server did; chief only."""
        plan, cluster, metrics = self.plan, self.cluster, self.files.metrics
        if metrics is None:
            return
        memory = model.memory_use()
        if memory and isinstance(strategy, SyncGpu):
            memory = {"parameters, slots, gradient": (len(plan.vectors) + 1) * plan.nbytes, **memory}
        if memory:
            metrics.write(step, seconds, {"device_memory": memory})
        found = strategy.stats().workers
        if not found:
            return
        metrics.write(step, seconds, worker_stats.as_json(found, plan.batch, plan.nbytes, seconds))
        hosts = cluster.host_of
        names = [hosts[rank] for rank in cluster.worker_ranks]
        _log.info("%s", worker_stats.table(found, names, plan.batch, plan.nbytes, seconds))
        if cluster.servers:
            held = [
                sum(hi - lo for lo, hi in ranges_of(plan.placements, server, plan.layout)) * plan.dtype.itemsize
                for server in range(plan.n_servers)
            ]
            _log.info("%s", worker_stats.server_table([hosts[rank] for rank in cluster.servers], held, found))


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


def _limit_threads(cluster: Cluster, given: int | None, devices: int) -> int:
    """Set and return the number of BLAS threads: as given, else from the environment, else this rank's share of cores.

    The devices of a rank compute at the same time and share its threads.
    """
    from_environment = [int(os.environ[name]) for name in _THREAD_VARIABLES if os.environ.get(name, "").isdigit()]
    threads = max(1, (given or (from_environment[0] if from_environment else cluster.threads)) // devices)
    threadpool_limits(threads)
    return threads


def _check_devices(cluster: Cluster, config: RunConfig, job: Job, devices: Sequence[Device]) -> None:
    """Check that the model supports the precision on some worker's device. Collective over all ranks.

    Raises:
        ConfigError: On every rank: it does not.
    """
    precision, layers = config.device.precision, isinstance(job.model, Layer)
    on_gpus = cluster.any(devices[0].is_gpu)
    if precision == "float32" or (on_gpus if layers else precision == "bfloat16"):
        return
    error = ConfigError(
        f"--precision {precision} requires GPUs for a model of layers, but no worker has one; use --precision float32"
        if layers
        else f"--precision {precision} is not available for PyTorch modules; use --precision bfloat16"
    )
    error.on_all_ranks = True
    raise error


def _limit_threads_of_torch(threads: int) -> None:
    """Set the number of torch's threads, if the job has imported it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def _launcher_run_dir() -> Path | None:
    """Return the run directory made by ``mpitrain run``, as a relative path, or None."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    return Path(os.path.relpath(run_dir)) if run_dir else None


def _register_rank() -> RankStatusFile:
    """Start this rank's reaper if a launcher started the rank, and register with ``mpitrain run`` if that did."""
    given, rank = os.environ.get(RUN_DIR_VARIABLE), launched_rank(os.environ)
    run_dir = Path(given) if given else None
    if is_launched(os.environ):
        become_reaper(run_dir, rank)
    if run_dir is not None:
        set_output_prefix(rank or None)
    return RankStatusFile(run_dir, rank)


def _find_files(request: TrainRequest, config: RunConfig, ranks: str) -> RunFiles:
    """Return the files of the run, in a directory that exists; nothing in it has changed yet."""
    folder = config.run.run_dir or _launcher_run_dir() or new_run_dir(request.name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_files(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    tables = {
        "run": config.as_toml(),
        "job": plain(request.arguments),
        "versions": {"job_file": request.name, **versions(), "mpi": library_name()},
    }
    return RunFiles(folder, Console(terminal_columns()), RunRecord(folder, tables, request.job_file, ranks))


def _has_finished_early(folder: Path) -> bool:
    """Return whether a hook has finished the run early; print it."""
    status = heartbeat.read(folder)
    if status is None or status.state != "finished early":
        return False
    why = f"finished early at step {status.step:,}: {status.reason}"
    print(f"nothing to train: {why}; to continue, pass --resume {shlex.quote(str(folder))}", flush=True)
    return True


def _notes_on_data(job: Job) -> list[str]:
    """Return the notes on how data is read, once per file."""
    notes = [
        split.note for split in (job.train_split, job.validation_split) if split is not None and split.note is not None
    ]
    return list(dict.fromkeys(notes))


def _headline(cluster: Cluster, name: str, config: RunConfig, threads: int, devices: Sequence[Device]) -> str:
    workers, servers = len(cluster.worker_ranks), len(cluster.servers)
    serving = f" and {servers} server{'s' * (servers != 1)}" if servers else ""
    nodes = f"{cluster.n_nodes} node{'s' * (cluster.n_nodes != 1)}"
    return (
        f"{name}: {workers} worker{'s' * (workers != 1)}{serving} on {nodes}, "
        f"{config.parallel.mode}, {config.training.dtype}, {threads} thread{'s' * (threads != 1)} each, "
        f"{library_name()}"
        + ("; on GPUs" if devices[0].is_gpu else "")
        + (f" in {config.device.precision}" if devices[0].is_gpu and config.device.precision != "float32" else "")
    )


def _describe_job(loop: Loop, examples: int, resumed: Path | None) -> str:
    plan = loop.plan
    backup = plan.config.parallel.mode == "backup" and plan.gradients_per_step < plan.workers
    of = f" of {plan.workers}" if backup else ""
    return (
        f"{plan.layout.n_params:,} parameters, {examples:,} training examples, "
        f"{plan.gradients_per_step}{of} x {plan.batch} examples per step"
        + (f"; resumed from {resumed} at step {loop.step:,}" if resumed else "")
    )


def _summary(loop: Loop, folder: Path, steps: int, seconds: float, compiling_s: float, end: RunEnd) -> str:
    lines = []
    if not steps:
        lines.append(f"nothing to train: already at step {loop.step:,} of {loop.train_steps:,}")
    else:
        rate = steps * loop.plan.step_examples / (seconds - compiling_s)
        took = f"{steps:,} step{'s' * (steps != 1)} in {seconds:.1f} s"
        if compiling_s > _SHORT_S:
            took += f", {compiling_s:.1f} s of them for compiling kernels"
        lines.append(f"{took}: {rate:,.0f} examples/s, including validation and saving")
    measured = "  ".join(describe(name, value) for name, value in loop.validation.items())
    if measured:
        lines.append(f"at step {loop.step:,}: {measured}")
    if end.state == "finished early":
        lines.append(f"finished early at step {loop.step:,} of {loop.train_steps:,}: {end.reason}")
    if end.state == "stopped":
        lines.append(
            f"stopped early at step {loop.step:,} of {loop.train_steps:,}; "
            f"to resume, run the same command with --run-dir {shlex.quote(str(folder))}"
        )
    else:
        lines.append(f"run directory: {folder}")
    return "\n".join(lines)
