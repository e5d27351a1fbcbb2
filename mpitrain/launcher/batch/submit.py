"""``mpitrain submit``: train in a batch job, with the same arguments as ``mpitrain run``."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ...batch_systems.base import BatchSystem
from ...batch_systems.job import Batch, Starter
from ...batch_systems.registry import SYSTEMS
from ...batch_systems.resources import Resources
from ...errors import ConfigError
from ...plan.config import RunConfig
from ...plan.options import PATH, NearestChoice, option, options_of
from ..mpi_flavors import library_flavor
from .scheduler import follow, submit
from .script import render
from .sweep import combinations

_STARTERS = list(dict.fromkeys(starter for system in SYSTEMS.values() for starter in system.starters))

_NAME_HELP = "Job name in the scheduler's tables.  [default: the job file's name]"
_SWEEP_HELP = "Train with each of these values, as a job array. Repeat for all combinations of several flags."
_LAUNCHER_HELP = "Program that starts the ranks.  [default: mpirun; srun for a heterogeneous job]"
_MPI_HELP = "MPI plugin for srun.  [default: pmix or pmi2, to match mpi4py's MPI]"
_SBATCH_HELP = "Extra flag for the scheduler's submit command, such as --nice=10 for sbatch."
_SETUP_HELP = "Shell line to run first: 'module load x'."
_SITE_HELP = "TOML file with defaults for these flags.  [default: $MPITRAIN_SITE, ~/.config/mpitrain/site.toml]"
_SCHEDULER: dict[str, Any] = {"type": NearestChoice([*SYSTEMS]), "default": next(iter(SYSTEMS)), "show_default": True}


def submit_options() -> list[click.Option]:
    """Return the flags of ``mpitrain submit``."""
    return [
        *options_of(Resources),
        option("--job-name", metavar="NAME", help=_NAME_HELP),
        option("--sweep", multiple=True, metavar="FLAG=V,V,...", help=_SWEEP_HELP),
        option("--launcher", type=NearestChoice(_STARTERS), help=_LAUNCHER_HELP),
        option("--mpi", metavar="PLUGIN", help=_MPI_HELP),
        option("--sbatch", multiple=True, metavar="FLAG", help=_SBATCH_HELP),
        option("--setup", multiple=True, metavar="LINE", help=_SETUP_HELP),
        option("--scheduler", help="Scheduler to write the script for.", **_SCHEDULER),
        option("--site", type=PATH, metavar="FILE", help=_SITE_HELP),
        option("--follow", is_flag=True, help="Print the job's log until it ends."),
        option("--dry-run", is_flag=True, help="Print the script without submitting it."),
    ]


@dataclasses.dataclass(frozen=True)
class SubmitRequest:
    """What to train.

    Attributes:
        job_name: The job file's name.
        options: All flags that can be swept: the run's and the job's.
        arguments: The arguments for the ranks, as given.
        config: The run's options.
        seeded: Whether a seed was given.
        check: Raises ConfigError if extra arguments are invalid together with ``arguments``.
    """

    job_name: str
    options: list[click.Option]
    arguments: list[str]
    config: RunConfig
    seeded: bool
    check: Callable[[Sequence[str]], None]


def submit_one(own: Mapping[str, Any], request: SubmitRequest) -> Path:
    """Submit a job that is no array; return its run directory."""
    batch = make_batch(own, request, Path.cwd(), sys.executable)
    if batch.in_tasks:
        raise ConfigError("an array has several runs; submit it with the command mpitrain submit")
    system = SYSTEMS[own["scheduler"]]
    submit(system, batch, render(system, batch))
    return batch.run_dir


def submit_job(own: Mapping[str, Any], request: SubmitRequest) -> int:
    """Render the script, then print it or submit it; return the exit status."""
    batch = make_batch(own, request, Path.cwd(), sys.executable)
    system = SYSTEMS[own["scheduler"]]
    script = render(system, batch)
    if own["dry_run"]:
        print(script.text, end="")
        return 0
    if own["follow"]:
        _check_follow(system, batch)
    job_id = submit(system, batch, script)
    log = system.log_path(batch, job_id)
    print(_submitted(job_id, log, batch))
    sys.stdout.flush()
    return 0 if not own["follow"] or follow(system, job_id, log) else 1


def make_batch(own: Mapping[str, Any], request: SubmitRequest, folder: Path, python: str) -> Batch:
    """Return the requested batch job.

    Raises:
        ConfigError: Options contradict each other.
    """
    resources = Resources(**{f.name: own[f.name] for f in dataclasses.fields(Resources)})
    _check_roles(resources, request, own["launcher"])
    name = own["job_name"] if own["job_name"] is not None else request.job_name
    starters = SYSTEMS[own["scheduler"]].starters
    # The last one starts the ranks of a heterogeneous job.
    starter: Starter = own["launcher"] or starters[-1 if resources.ps_nodes else 0]
    if starter not in starters:
        raise ConfigError(f"--launcher {starter} is not available with --scheduler {own['scheduler']}; remove it")
    points = combinations(own["sweep"], request.options) if own["sweep"] else []
    for point in points:
        request.check(point.words)
    if points and resources.ps_nodes:
        raise ConfigError("--sweep makes an array, and a heterogeneous job cannot be an array; remove --ps-nodes")
    return Batch(
        name,
        resources,
        folder,
        folder / (request.config.run.run_dir or _new_run_dir(folder, request.job_name)),
        python,
        request.arguments,
        points,
        seeds=not request.seeded,
        starter=starter,
        mpi=own["mpi"] or (_mpi_of_library() if starter == "srun" else ""),
        extra=own["sbatch"],
        setup=own["setup"],
    )


def _check_roles(resources: Resources, request: SubmitRequest, launcher: str | None) -> None:
    config = request.config
    if not resources.ps_nodes:
        config.check_ranks(resources.ranks)
        return
    if not config.served:
        raise ConfigError(f"--ps-nodes requires --mode async, ssp or backup, not {config.parallel.mode}")
    RunConfig.of(**config.options() | {"ps": resources.servers}).check_ranks(resources.ranks)
    ps = config.servers.ps
    if ps not in (0, resources.servers):
        raise ConfigError(
            f"--ps {ps} differs from the {resources.servers} servers of --ps-nodes and --ps-tasks-per-node; remove --ps"
        )
    if launcher == "mpirun":
        raise ConfigError("--launcher mpirun does not support --ps-nodes (a heterogeneous job); remove it to use srun")


def _mpi_of_library() -> str:
    """Return the ``srun`` MPI plugin that this environment's MPI library supports."""
    return "pmix" if library_flavor()[0] == "openmpi" else "pmi2"


def _new_run_dir(folder: Path, name: str) -> Path:
    """Return a directory that does not exist yet; the scheduler's log is written to it before the run starts."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(Path("runs") / name for name in names if not (folder / "runs" / name).exists())


def _check_follow(system: BatchSystem, batch: Batch) -> None:
    if batch.in_tasks or not system.can_follow:
        names = " or ".join(each.title for each in SYSTEMS.values() if each.can_follow)
        raise ConfigError(
            f"--follow supports only a single job of {names}; remove it, and list the runs with mpitrain runs instead"
        )


def _submitted(number: str, log: Path, batch: Batch) -> str:
    """Return the message about a submitted job."""
    resources = batch.resources
    nodes = resources.nodes + resources.ps_nodes
    size = f"{resources.ranks} rank{'s' * (resources.ranks != 1)} on {nodes} node{'s' * (nodes != 1)}"
    runs = f", {len(batch.points)} runs" if batch.points else ""
    folder = _shown(batch.run_dir, batch)
    if batch.in_tasks:
        see = f"watch:   mpitrain runs {folder}\ncompare: mpitrain report {folder}"
    else:
        see = f"watch:   mpitrain watch {folder}"
    return f"job {number}: {batch.name}, {size}{runs}\nlog:     {_shown(log, batch)}\n{see}"


def _shown(path: Path, batch: Batch) -> str:
    """Return a path as the user would type it: relative to the working directory if it is below it."""
    near = path.relative_to(batch.folder) if path.is_relative_to(batch.folder) else path
    return shlex.quote(str(near))
