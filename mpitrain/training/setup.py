"""The values that the ranks of a run agree on before training: the job, its plan, devices, and the run's files."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import checkpoint
from ..batch_systems.registry import array_index
from ..checkpoint.resume import ResumePlan, plan_resume
from ..comm.cluster import Cluster
from ..comm.mpi import library_name
from ..core import activity
from ..core.cpus import SHOW_BINDING
from ..core.device import Device
from ..core.extra_state import HasExtraState
from ..errors import CheckpointError, ConfigError
from ..gpu.discovery import choose_devices
from ..monitor import heartbeat
from ..monitor.console import Console, terminal_columns
from ..monitor.format import format_table
from ..monitor.loggers import check_installed
from ..monitor.metrics import last_step
from ..monitor.run_record import RunRecord
from ..plan.config import RunConfig, plain
from ..plan.job import Job, errors_located
from ..plan.plan import Plan, check_virtual_workers, make_plan
from ..plan.progress import Progress
from ..plan.roles import HOW_ROLES_ARE_GIVEN
from ..process.fork_server import given_environment, import_in_server
from ..process.launcher_env import FAILED_AT, FIRST_RANKS, RESTART_COUNT
from ..process.rank_status import RUN_DIR_VARIABLE, RankStatusFile, record_import
from ..process.run_directory import forget_stop, make_run_dir
from ..process.standard_streams import set_output_prefix
from .loop import Loop, RunFiles
from .messages import notes_on_data, notes_on_patience
from .resources import check_devices, limit_threads, limit_threads_of_torch
from .versions import versions

_RANK_COLUMNS = ("rank", "host", "role", "task", "device", "cores", "NUMA")


@dataclass(frozen=True)
class TrainRequest:
    """The training that a rank performs.

    Attributes:
        job_file: The path of the job file, or of the script that trains.
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


@dataclass(frozen=True)
class Setup:
    """The values that the ranks of a run have agreed on.

    Attributes:
        devices: The devices of this rank.
        threads: The number of this rank's BLAS threads.
        ranks: A table of all ranks.
        notes: Lines for the chief to print.
    """

    cluster: Cluster
    request: TrainRequest
    job: Job
    plan: Plan
    devices: Sequence[Device]
    threads: int
    ranks: str
    files: RunFiles
    resume_plan: ResumePlan
    notes: Sequence[str]


def _slow_imports() -> set[str]:
    """Return the modules that restarted ranks should find imported; torch's optimizers import ``torch._dynamo``.

    There are none if the job or script has set variables that these modules read when they are imported.
    """
    given, read = given_environment(), ("TORCH", "PYTORCH")
    changed = {name for name, value in os.environ.items() if name.startswith(read) and given.get(name) != value}
    return {"torch", "torch._dynamo"} & sys.modules.keys() if changed <= {"TORCHINDUCTOR_CACHE_DIR"} else set()


def set_up(cluster: Cluster, request: TrainRequest, rank_status: RankStatusFile) -> Setup:
    """Assign roles and devices, make the job, and determine the files of the run. Collective over all ranks."""
    config = request.config
    cluster.assign(config)
    rank_status.set_role(cluster.role, cluster.task_index)
    activity.set_limits(config.run.hang_timeout, config.run.long_timeout)
    if RUN_DIR_VARIABLE in os.environ:
        set_output_prefix(None if cluster.chief else cluster.rank)
    devices, notes = choose_devices(cluster, config)
    threads = limit_threads(cluster, config.device.threads, len(devices))
    on_cpus = cluster.any(not devices[0].is_gpu)
    are_mixed = on_cpus and cluster.any(devices[0].is_gpu)
    with cluster.agree("making the job"):
        job = request.make()
        config, more = _with_virtual_workers(cluster, request, job, job.completed(config), are_mixed)
        if config.virtual_workers is not None and config.device.threads is None and on_cpus:
            # The order of the sums in matrix products may depend on the number of threads.
            threads, config = limit_threads(cluster, 1, 1), config.merged({"threads": 1})
        config.check_ranks(cluster.size)  # the job may set the number of virtual workers
        with errors_located(request.job_file, job):
            plan = make_plan(job, config, len(cluster.worker_ranks))
            facts = {**config.as_toml(), **job.facts()}
        limit_threads_of_torch(threads)
    if RUN_DIR_VARIABLE in os.environ:
        for module in _slow_imports():
            record_import(Path(os.environ[RUN_DIR_VARIABLE]), module)
            import_in_server(os.environ[RUN_DIR_VARIABLE], module)
    cluster.check_same(facts)
    if plan.config.training.train_epochs is not None:  # notices that are printed before the state is restored need it
        start = resumes_at(plan.config) if cluster.chief else None
        plan.length.begin(Progress(*cluster.comm.bcast(start, root=cluster.chief_rank)))
    cluster.check_layout(plan.layout)
    check_devices(cluster, config, job, devices)
    device = " ".join(each.name for each in devices)
    rows, crowding = cluster.table(device)
    ranks = format_table(_RANK_COLUMNS, rows)
    notes = [*notes, *more, *crowding, *([ranks] if SHOW_BINDING in os.environ else [])]
    files, resume_plan = _find_run(cluster, request, job, plan, ranks)
    if "TF_CONFIG" in os.environ:
        notes = [*notes, f"TF_CONFIG is not used. {HOW_ROLES_ARE_GIVEN}"]
    notes = [*notes, *resume_plan.notes, *notes_on_data(job), *notes_on_patience(job, plan)]
    return Setup(cluster, request, job, plan, devices, threads, ranks, files, resume_plan, notes)


def _with_virtual_workers(
    cluster: Cluster, request: TrainRequest, job: Job, config: RunConfig, are_mixed: bool
) -> tuple[RunConfig, list[str]]:
    """Return the options of a run with as many virtual workers as it has begun with, and notes. Local.

    This concerns a run that may continue on fewer ranks, if no number of virtual workers is given. If it cannot have
    any, the options say so.

    Args:
        are_mixed: Whether some ranks have GPUs, and others have none.
    """
    first, mode = os.environ.get(FIRST_RANKS), config.mode
    if config.parallel.virtual_workers is not None or mode.uses_servers:
        return config, []
    if not mode.keeps_steps:
        problem = f"in --mode {mode.name}, pass --virtual-workers N"
    elif request.script is not None:  # which could do what does not work with them
        problem = "for a script, pass --virtual-workers N"
    elif are_mixed:
        problem = "only some workers have a GPU"
    else:
        try:
            candidate = config.merged({"virtual_workers": int(first or len(cluster.worker_ranks))})
            check_virtual_workers(job, candidate)
            return candidate if first else config, []
        except ConfigError as error:
            problem = str(error)
    if mode.keeps_steps and request.script is None:
        config = config.merged({"virtual_workers": 0})
    # Other problems are those of the job, and were told at the first start.
    is_new = first is not None and (are_mixed or os.environ.get(RESTART_COUNT, "0") == "0")
    return config, [f"on fewer ranks, a step will use fewer examples: {problem}"] if is_new else []


def _find_run(cluster: Cluster, request: TrainRequest, job: Job, plan: Plan, ranks: str) -> tuple[RunFiles, ResumePlan]:
    """Return the files of the run, and how the run resumes. Collective over all ranks."""
    config, files, resume_plan = plan.config, RunFiles(Path()), ResumePlan()
    with cluster.agree("reading the run directory"):
        if cluster.chief:
            if config.output.logger is not None:
                check_installed(config.output.logger)
            files = _find_files(request, job, config, ranks)
            resume_plan = plan_resume(config, files.checkpoints, plan.layout)
            if files.record is not None and (resume_plan.resume or FAILED_AT in os.environ):
                is_other = resume_plan.resume and not resume_plan.saved
                files.record.check_data(resume_plan.resume[0].resolve().parent.parent if is_other else files.folder)
            if resume_plan.auto and (resume_plan.resume or config.run.join):
                resume_plan = resume_plan._replace(finished=_has_finished_early(files.folder, config.run.join))
            elif resume_plan.auto:
                status = heartbeat.read(files.folder)
                lost_step = max(status.step if status is not None else 0, last_step(files.folder / "metrics.jsonl"))
                resume_plan = resume_plan._replace(lost_step=lost_step)
    resume_plan, files.folder = cluster.comm.bcast((resume_plan, files.folder), root=cluster.chief_rank)
    return files, resume_plan


def _requested_run_dir(config: RunConfig) -> Path | None:
    """Return the run directory that the user has named, or ``mpitrain run`` has made; None if there is none yet."""
    made = os.environ.get(RUN_DIR_VARIABLE)
    return config.run.run_dir or (Path(os.path.relpath(made)) if made else None)


def resumes_at(config: RunConfig) -> tuple[int, int]:
    """Return step and data cursor of the checkpoint from which a run resumes; zeros if no checkpoint can be read."""
    path = _requested_run_dir(config) if config.run.resume == "auto" else Path(config.run.resume)
    if path is None or config.run.resume == "never":
        return 0, 0
    try:
        with checkpoint.Checkpoint(checkpoint.find(path)[0]) as opened:
            return opened.step, int(opened.attributes["/"]["position"])
    except CheckpointError:  # reported when the run begins, if it is relevant
        return 0, 0


def _find_files(request: TrainRequest, job: Job, config: RunConfig, ranks: str) -> RunFiles:
    """Make the run directory, and return the files of the run; none of them is written yet."""
    requested = _requested_run_dir(config)
    folder, _ = make_run_dir(request.name, requested, config.run.join, array_index(os.environ))
    if RUN_DIR_VARIABLE not in os.environ:
        forget_stop(folder)
    tables = {
        "run": config.as_toml(),
        "job": plain(request.arguments),
        "versions": {"job_file": request.name, **versions(), "mpi": library_name()},
        "data": {name: split.identity() for name, split in job.splits.items()},
    }
    return RunFiles(folder, Console(terminal_columns()), RunRecord(folder, tables, request.job_file, ranks))


def _has_finished_early(folder: Path, join: Path | None) -> bool:
    """Return whether a hook has finished the run early, or the run that it joins; if so, print a message."""
    status = heartbeat.read(join or folder)
    if status is None or status.state != "finished early":
        return False
    advice = f"to continue, pass --resume {shlex.quote(str(folder))}"
    if join is not None:
        advice = f"to continue, --join another directory, with --init-from {shlex.quote(str(join))}"
    print(f"nothing to train: the run finished early at step {status.step:,} ({status.reason}); {advice}", flush=True)
    return True
