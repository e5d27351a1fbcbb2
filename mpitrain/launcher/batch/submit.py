"""``mpitrain submit``: a batch job that trains, from the same words as ``mpitrain run``."""

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

from ...errors import ConfigError
from ...plan.config import RunConfig
from ...plan.options import NearestChoice, options_of
from ..mpi_flavors import library_flavor
from .job import Batch, Starter
from .resources import Resources
from .scheduler import follow, submit
from .script import Scheduler, render
from .sweep import combinations

_SCHEDULERS = ["slurm", "pbs", "lsf"]


def submit_options() -> list[click.Option]:
    """The flags of ``mpitrain submit`` itself."""
    return [
        *options_of(Resources),
        click.Option(
            ["--job-name"],
            default=None,
            metavar="NAME",
            help="Name in the scheduler's tables.  [default: the job file's]",
        ),
        click.Option(
            ["--sweep"],
            multiple=True,
            default=(),
            metavar="FLAG=V,V,...",
            help="Train with each of these values, all combinations: an array. May be given several times.",
        ),
        click.Option(
            ["--launcher"],
            type=NearestChoice(["mpirun", "srun"]),
            default=None,
            help="What starts the ranks.  [default: mpirun; srun for a heterogeneous job]",
        ),
        click.Option(
            ["--mpi"],
            default=None,
            metavar="PLUGIN",
            help="How srun talks to MPI.  [default: pmix or pmi2, as it needs]",
        ),
        click.Option(
            ["--sbatch"], multiple=True, default=(), metavar="FLAG", help="A further flag of sbatch, such as --nice=10."
        ),
        click.Option(
            ["--setup"], multiple=True, default=(), metavar="LINE", help="Shell to begin with, such as 'module load x'."
        ),
        click.Option(
            ["--scheduler"], type=NearestChoice(_SCHEDULERS), default="slurm", show_default=True, help="Whose script."
        ),
        click.Option(
            ["--site"],
            default=None,
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="TOML file with defaults for these flags.  [default: $MPITRAIN_SITE, ~/.config/mpitrain/site.toml]",
        ),
        click.Option(["--follow"], is_flag=True, help="Print the job's log until it ends."),
        click.Option(["--dry-run"], is_flag=True, help="Print the script, do not submit it."),
    ]


@dataclasses.dataclass(frozen=True)
class SubmitRequest:
    """What is to be trained.

    Attributes:
        job_name: The job file's.
        options: All flags that can be swept: the run's and the job's.
        arguments: The words for the ranks, as they were given.
        config: The run's options.
        seeded: Whether a seed was given.
        check: Raises ConfigError where more words do not go together with those that were given.
    """

    job_name: str
    options: list[click.Option]
    arguments: list[str]
    config: RunConfig
    seeded: bool
    check: Callable[[Sequence[str]], None]


def submit_job(own: Mapping[str, Any], asked: SubmitRequest) -> int:
    """Render the script, and print it or submit it; return the exit status."""
    batch = make_batch(own, asked, Path.cwd(), sys.executable)
    script = render(own["scheduler"], batch)
    if own["dry_run"]:
        print(script.text, end="")
        return 0
    if own["follow"] and (batch.in_tasks or own["scheduler"] != "slurm"):
        raise ConfigError(
            "--follow streams the log of one Slurm job: leave it out, and see the runs with mpitrain runs"
        )
    number = submit(own["scheduler"], batch, script)
    log = _log(own["scheduler"], batch, number)
    print(_told(number, log, batch))
    sys.stdout.flush()
    if own["follow"]:
        return 0 if follow(number, log) else 1
    return 0


def make_batch(own: Mapping[str, Any], asked: SubmitRequest, folder: Path, python: str) -> Batch:
    """The batch job that was asked for.

    Raises:
        ConfigError: What was asked for does not go together.
    """
    resources = Resources(**{f.name: own[f.name] for f in dataclasses.fields(Resources)})
    _check_roles(resources, asked, own["launcher"])
    name = own["job_name"] if own["job_name"] is not None else asked.job_name
    starter: Starter = own["launcher"] or ("srun" if resources.ps_nodes else "mpirun")
    if starter == "srun" and own["scheduler"] != "slurm":
        raise ConfigError(f"--launcher srun goes with --scheduler slurm, not {own['scheduler']}: leave it out")
    points = combinations(own["sweep"], asked.options) if own["sweep"] else []
    for point in points:
        asked.check(point.words)
    if points and resources.ps_nodes:
        raise ConfigError("--sweep makes an array, and there are no arrays of heterogeneous jobs: leave out --ps-nodes")
    return Batch(
        name,
        resources,
        folder,
        folder / (asked.config.run_dir or _new_run_dir(folder, asked.job_name)),
        python,
        asked.arguments,
        points,
        seeds=not asked.seeded,
        starter=starter,
        mpi=own["mpi"] or (_mpi_of_library() if starter == "srun" else ""),
        extra=own["sbatch"],
        setup=own["setup"],
    )


def _check_roles(resources: Resources, asked: SubmitRequest, launcher: str | None) -> None:
    config = asked.config
    if not resources.ps_nodes:
        config.check_ranks(resources.ranks)
        return
    if not config.served:
        raise ConfigError(f"--ps-nodes goes with --mode async, ssp or backup, and the mode is {config.mode}")
    dataclasses.replace(config, ps=resources.servers).check_ranks(resources.ranks)
    if config.ps not in (0, resources.servers):
        raise ConfigError(
            f"--ps {config.ps} servers, and --ps-nodes with --ps-tasks-per-node makes {resources.servers}: "
            "leave out --ps"
        )
    if launcher == "mpirun":
        raise ConfigError("--launcher mpirun sees one part of a heterogeneous job only: leave it out, srun sees all")


def _mpi_of_library() -> str:
    """Which of ``srun``'s plugins the MPI library of this environment understands."""
    return "pmix" if library_flavor()[0] == "openmpi" else "pmi2"


def _new_run_dir(folder: Path, name: str) -> Path:
    """A folder that is not there yet; the scheduler's log is to lie in it before the run begins."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(Path("runs") / name for name in names if not (folder / "runs" / name).exists())


def _log(scheduler: Scheduler, batch: Batch, number: str) -> Path:
    """The log of a job; the folder of the logs where there are several, or the scheduler chooses their names."""
    return batch.log_dir if batch.in_tasks or scheduler == "pbs" else batch.log_dir / f"{number}.log"


def _told(number: str, log: Path, batch: Batch) -> str:
    """What a user is told of a job that was submitted."""
    asked = batch.resources
    nodes = asked.nodes + asked.ps_nodes
    what = f"{asked.ranks} rank{'s' * (asked.ranks != 1)} on {nodes} node{'s' * (nodes != 1)}"
    runs = f", {len(batch.points)} runs" if batch.points else ""
    folder = _shown(batch.run_dir, batch)
    if batch.in_tasks:
        see = f"watch:   mpitrain runs {folder}\ncompare: mpitrain report {folder}"
    else:
        see = f"watch:   mpitrain watch {folder}"
    return f"job {number}: {batch.name}, {what}{runs}\nlog:     {_shown(log, batch)}\n{see}"


def _shown(path: Path, batch: Batch) -> str:
    """A path as the user would type it."""
    near = path.relative_to(batch.folder) if path.is_relative_to(batch.folder) else path
    return shlex.quote(str(near))
