"""``mpitrain submit``: train in a batch job, with the same arguments as ``mpitrain run``."""

from __future__ import annotations

import itertools
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ...batch_systems.base import BatchSystem
from ...batch_systems.job import Batch
from ...batch_systems.registry import SYSTEMS
from ...batch_systems.resources import Resources
from ...core.words import counted
from ...errors import ConfigError
from ...monitor.heartbeat import read, states
from ...plan.config import RunConfig
from ...plan.modes import names_of_modes
from ...plan.request import JobRequest, Workload
from ...process.run_directory import LEARNERS, check_learner_dir
from .. import bad_hosts
from ..mpi_flavors import library_flavor
from .request import SubmitRequest
from .scheduler import follow, submit
from .script import render

_RESTARTS = 3  # for each spare node, as ranks also die for other reasons


def submit_one(request: SubmitRequest) -> Path:
    """Submit a job that is not an array; return its run directory."""
    batch = make_batch(request, Path.cwd(), sys.executable)
    if batch.in_tasks:
        raise ConfigError("an array has several runs; submit it with the command mpitrain submit")
    system = SYSTEMS[request.options.scheduler]
    submit(system, batch, render(system, batch))
    return batch.run_dir


def submit_job(request: SubmitRequest) -> int:
    """Render the script, then print it or submit it; return the exit status."""
    options, system = request.options, SYSTEMS[request.options.scheduler]
    batch = make_batch(request, Path.cwd(), sys.executable)
    script = render(system, batch)
    if options.dry_run:
        print(script.text, end="")
        return 0
    if options.follow:
        _check_follow(system, batch)
    job_id = submit(system, batch, script)
    log = system.log_path(batch, job_id)
    print(_submitted(job_id, log, batch, request.workload.join))
    sys.stdout.flush()
    return 0 if not options.follow or follow(system, job_id, log) else 1


def make_batch(request: SubmitRequest, folder: Path, python: str) -> Batch:
    """Return the requested batch job.

    Raises:
        ConfigError: Options contradict each other.
    """
    resources, options, workload = request.resources, request.options, request.workload
    _check_roles(resources, workload)
    system = SYSTEMS[options.scheduler]
    starter = system.choose_starter(options.launcher, resources)
    if request.points and resources.ps_nodes:
        raise ConfigError(
            "--sweep submits a job array, but --ps-nodes a heterogeneous job, which cannot be an array; remove one"
        )
    if workload.join is not None and request.points:
        raise ConfigError(
            "--sweep trains each run by itself, and --join trains one model by all of them; use --array 0-7 for eight "
            "learners, or remove one"
        )
    run_dir = folder / (workload.run_dir or _run_dir(folder, workload, is_array=resources.array is not None))
    spares = resources.spare_hosts
    launch_flags = ["--spare-hosts", str(spares), "--max-restarts", str(_RESTARTS * spares)] if spares else []
    batch = Batch(
        workload.name if options.job_name is None else options.job_name,
        resources,
        folder,
        run_dir,
        python,
        workload.with_options(run_dir=None).words,
        starter,
        request.points,
        seeds=isinstance(workload, JobRequest) and "seed" not in workload.options and workload.join is None,
        mpi=system.mpi_plugin(starter, options.mpi, lambda: library_flavor()[0]),
        extra=options.sbatch,
        setup=options.setup,
        bad_hosts=list(bad_hosts.read(run_dir)),
        launch_flags=launch_flags + ([] if options.stage_env is None else ["--stage-env", str(options.stage_env)]),
        rank_command=workload.command,
        keeps_checkpoints=workload.keeps_checkpoints,
    )
    for _, each in batch.run_dirs(system.first_index):
        check_learner_dir(each, None if workload.join is None else folder / workload.join)
    if workload.join is not None and batch.in_tasks:
        _check_elements(system, batch, workload.join)
    return batch


def _check_elements(system: BatchSystem, batch: Batch, join: Path) -> None:
    """Reject an array of which some elements are learners of the run already, unless all are, and have ended.

    Raises:
        ConfigError: Some are, or have not ended.
    """
    folders = {at - system.first_index: path for at, path in batch.run_dirs(system.first_index) if at is not None}
    present = [at for at, path in folders.items() if path.exists()]
    if not present:
        return
    if new := [at for at in folders if at not in present]:
        raise ConfigError(
            f"--array {batch.array}: the run {join} has learners of the elements {_indexes(present)} already; --array "
            f"{_indexes(new)} adds the others, and --array {_indexes(present)} continues those when they have ended"
        )
    state_of = states(folders.values())
    jobs = {
        path: status.job.job_id
        for path, state in state_of.items()
        if state != "running" and (status := read(path)) is not None and status.job is not None
    }
    waiting = {job for job, state in system.states(jobs.values()).items() if not state.has_ended}
    live = [at for at, path in folders.items() if state_of[path] == "running" or jobs.get(path) in waiting]
    if live:
        more = range(max(present) + 1, max(present) + 1 + len(present))
        raise ConfigError(
            f"--array {batch.array}: the learners of the elements {_indexes(live)} wait or run already; --array "
            f"{_indexes(more)} adds others, and mpitrain stop {shlex.quote(str(join))} ends all"
        )


def _indexes(numbers: Sequence[int]) -> str:
    """Return ascending numbers as the value of ``--array``."""
    count = itertools.count()
    parts = [[*group] for _, group in itertools.groupby(numbers, key=lambda at: at - next(count))]
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _check_roles(resources: Resources, workload: Workload) -> None:
    if not resources.ps_nodes:
        workload.check_ranks(resources.ranks)
        return
    if not isinstance(workload, JobRequest):
        raise ConfigError("--ps-nodes requires a job with parameter servers, not a program; remove --ps-nodes")
    config = workload.config
    if not config.uses_servers:
        modes = names_of_modes(lambda mode: mode.uses_servers)
        raise ConfigError(f"--ps-nodes requires --mode {', '.join(modes)}, not {config.parallel.mode}")
    RunConfig.of(**config.options() | {"ps": resources.servers}).check_ranks(resources.ranks)
    ps = config.servers.ps
    if ps not in (0, resources.servers):
        raise ConfigError(
            f"--ps {ps} differs from the {resources.servers} servers of --ps-nodes and --ps-tasks-per-node; remove --ps"
        )


def _run_dir(folder: Path, workload: Workload, is_array: bool) -> Path:
    """Return the directory of a new run, which does not exist; of an array of learners, their common parent.

    The scheduler's log is written to it before the run starts.
    """
    parent = Path("runs") if workload.join is None else workload.join / LEARNERS
    if workload.join is not None and is_array:
        return parent
    stem = f"{workload.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(parent / name for name in names if not (folder / parent / name).exists())


def _check_follow(system: BatchSystem, batch: Batch) -> None:
    if batch.in_tasks or not system.can_follow:
        names = " or ".join(other.title for other in SYSTEMS.values() if other.can_follow)
        raise ConfigError(
            f"--follow supports only a single job of {names}; remove --follow, and list the runs with mpitrain runs"
        )


def _submitted(number: str, log: Path, batch: Batch, join: Path | None) -> str:
    """Return the message about a submitted job; ``join`` is the run of its learners, if any."""
    resources = batch.resources
    nodes, spares = resources.nodes + resources.ps_nodes, resources.spare_hosts
    size = f"{counted(resources.ranks, 'rank')} on {counted(nodes, 'node')}"
    size += f" and {counted(spares, 'spare node')}" if spares else ""
    runs = f", {len(batch.points)} runs" if batch.points else ""
    folder = _shown(batch.run_dir, batch)
    if batch.in_tasks:
        folder = folder if join is None else _shown(batch.folder / join, batch)
        see = f"watch:   mpitrain runs {folder}\ncompare: mpitrain report {folder}"
    else:
        see = f"watch:   mpitrain watch {folder}"
    return f"job {number}: {batch.name}, {size}{runs}\nlog:     {_shown(log, batch)}\n{see}"


def _shown(path: Path, batch: Batch) -> str:
    """Return a path as the user would type it: relative to the working directory if that contains the path."""
    near = path.relative_to(batch.folder) if path.is_relative_to(batch.folder) else path
    return shlex.quote(str(near))
