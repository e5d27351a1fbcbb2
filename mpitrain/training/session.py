"""One training run of a rank: from a request to the record of how it ended."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import checkpoint
from ..batch_systems.registry import end_of_time
from ..checkpoint.resume import ResumePlan, plan_resume
from ..comm.cluster import Cluster
from ..comm.mpi import library_name
from ..core import activity, subnormals
from ..core.extra_state import HasExtraState
from ..core.training_state import TrainingState
from ..errors import CheckpointError
from ..gpu.discovery import choose_devices
from ..monitor import heartbeat
from ..monitor.console import Console, terminal_columns
from ..monitor.format import format_table
from ..monitor.heartbeat import RunEnd
from ..monitor.loggers import check_installed
from ..monitor.run_record import RunRecord
from ..monitor.trace import span
from ..plan.config import RunConfig, plain
from ..plan.job import Job, errors_located
from ..plan.plan import Plan, make_plan
from ..plan.roles import HOW_ROLES_ARE_GIVEN
from ..process.fork_server import import_in_server
from ..process.output_prefix import set_output_prefix
from ..process.rank_status import RUN_DIR_VARIABLE, RankStatusFile
from ..process.run_directory import cannot_write, check_files, new_run_dir
from ..process.signals import Signals, TimeLimit
from ..strategy.select import make_server, trains_on_gpus
from .loop import Loop, RunFiles
from .memory_recovery import kept_run_dir
from .messages import headline, notes_on_data
from .placement_report import placement_report
from .resources import check_devices, limit_threads, limit_threads_of_torch, restart_blas_threads
from .restore import restore
from .telemetry import Telemetry
from .versions import versions
from .worker import Worker

_log = logging.getLogger(__name__)
_WAIT = span("wait")
_RANK_COLUMNS = ("rank", "host", "role", "task", "device")


@dataclass(frozen=True)
class TrainRequest:
    """The training that a rank performs.

    Attributes:
        job_file: Its path; of a script that trains, the path of the script.
        arguments: The job function's arguments, for the record.
        config: The run's options as the user gave them.
        make: Makes the job; may fail on one rank only.
        loop: The class of the training loop.
        script: The state of the script that trains, or None.
    """

    job_file: Path
    arguments: dict[str, Any]
    config: RunConfig
    make: Callable[[], Job]
    loop: type[Loop] = Loop
    script: HasExtraState | None = None

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job_file.stem


@dataclass
class Session:
    """A training run of this rank.

    Attributes:
        run_dir: The run directory.
        loop: The worker's training loop; None on a server, and if there is nothing to train.
        stopped: Whether the run was asked to stop early; valid afterwards, and the same on every rank.
    """

    run_dir: Path
    loop: Loop | None = None
    stopped: bool = False


@contextmanager
def training_session(cluster: Cluster, request: TrainRequest, rank_status: RankStatusFile) -> Iterator[Session]:
    """Prepare to train; the block runs the loop. Collective over all ranks, at the beginning and at the end.

    A parameter server serves before the block, until the workers have ended.
    """
    # Threads that compute are started later, and inherit the mode.
    with subnormals.flushed(request.config.device.flush_denormals):
        restart_blas_threads()
        with _session(cluster, request, rank_status) as session:
            yield session
    restart_blas_threads()


@contextmanager
def _session(cluster: Cluster, request: TrainRequest, rank_status: RankStatusFile) -> Iterator[Session]:
    config = request.config
    cluster.assign(config)
    rank_status.set_role(cluster.role, cluster.task_index)
    activity.set_limits(config.run.hang_timeout, config.run.long_timeout)
    if RUN_DIR_VARIABLE in os.environ:
        set_output_prefix(None if cluster.chief else cluster.rank)
    devices, notes = choose_devices(cluster, config)
    threads = limit_threads(cluster, config.device.threads, len(devices))
    with cluster.agree("making the job"):
        job = request.make()
        config = config.merged({"batch_size": job.batch_size, "train_steps": job.train_steps})
        with errors_located(request.job_file, job):
            plan = make_plan(job, config, len(cluster.worker_ranks))
            facts = {**config.as_toml(), **job.facts()}
        limit_threads_of_torch(threads)
    if "torch" in sys.modules and RUN_DIR_VARIABLE in os.environ:
        import_in_server(os.environ[RUN_DIR_VARIABLE], "torch")
    cluster.check_same(facts)
    cluster.check_layout(plan.layout)
    check_devices(cluster, config, job, devices)
    ranks = format_table(_RANK_COLUMNS, cluster.table(" ".join(device.name for device in devices)))
    files, resume_plan = RunFiles(Path()), ResumePlan()
    with cluster.agree("reading the run directory"):
        if cluster.chief:
            if config.output.logger is not None:
                check_installed(config.output.logger)
            files = _find_files(request, config, ranks)
            resume_plan = plan_resume(config, files.checkpoints, plan.layout)
            finished = resume_plan.auto and bool(resume_plan.resume) and _has_finished_early(files.folder)
            resume_plan = resume_plan._replace(finished=finished)
    resume_plan, files.folder = cluster.comm.bcast((resume_plan, files.folder), root=cluster.chief_rank)
    session = Session(files.folder.absolute())
    if resume_plan.finished:
        yield session
        return
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
            _log.info("%s", headline(cluster, request.name, config, threads, devices))
            if "TF_CONFIG" in os.environ:
                notes = [*notes, f"TF_CONFIG is not used. {HOW_ROLES_ARE_GIVEN}"]
            for note in [*notes, *resume_plan.notes, *notes_on_data(job)]:
                _log.info("%s", note)
        if cluster.is_server:
            _serve(cluster, job, plan, resume_plan, telemetry, request.loop, kept_run_dir(session.run_dir))
            end = RunEnd("finished")
            yield session
        else:
            # Only the chief's clock counts, so only the chief queries the batch system.
            until = end_of_time(plan.config.run.time_limit) if cluster.chief else None
            limit = TimeLimit(until, time.time())
            worker = Worker(cluster, job, plan, files, telemetry, resume_plan, request.loop, request.script)
            with (
                errors_located(request.job_file, job),
                worker.prepared(devices, signals, limit, rank_status) as session.loop,
            ):
                yield session
            end = worker.end
        telemetry.write_trace()
    finally:
        if files.console is not None:
            files.console.stop()
        telemetry.close(end, sys.exc_info()[1])
    session.stopped = cluster.any(end.state == "stopped")


def _serve(
    cluster: Cluster,
    job: Job,
    plan: Plan,
    resume_plan: ResumePlan,
    telemetry: Telemetry,
    loop: type[Loop],
    run_dir: str | None,
) -> None:
    """Run a parameter server for workers with this training loop."""
    server = make_server(cluster, plan, TrainingState(plan.layout, job.network.frozen))
    beginning = restore(cluster, plan, job.network, resume_plan, server.initial_vectors, run_dir)
    server.start(beginning.progress)
    if not beginning.is_complete(plan):
        telemetry.open(None, 0)
    activity.become("wait")  # between requests
    server.serve()  # ends when the workers report that they have saved, also after a signal
    activity.become("end")
    with _WAIT:
        loop.free(server.close)


def _given_run_dir(config: RunConfig) -> Path | None:
    """Return the run directory that the user has given, or ``mpitrain run`` has made; None if there is none yet."""
    made = os.environ.get(RUN_DIR_VARIABLE)
    return config.run.run_dir or (Path(os.path.relpath(made)) if made else None)


def resumes_at(config: RunConfig) -> tuple[int, int]:
    """Return the step, and the number of examples taken, of the checkpoint from which a run resumes; zeros if none."""
    path = _given_run_dir(config) if config.run.resume == "auto" else Path(config.run.resume)
    if path is None or config.run.resume == "never":
        return 0, 0
    try:
        with checkpoint.Checkpoint(checkpoint.find(path)[0]) as opened:
            return opened.step, int(opened.attributes["/"]["position"])
    except CheckpointError:  # reported when the run begins, if it matters
        return 0, 0


def _find_files(request: TrainRequest, config: RunConfig, ranks: str) -> RunFiles:
    """Return the files of the run, in a directory that exists; nothing in it has changed yet."""
    folder = _given_run_dir(config) or new_run_dir(request.name)
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
