"""Requests to submit a batch job, made by ``mpitrain submit`` and the Python API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from ...batch_systems.job import Point
from ...batch_systems.registry import SYSTEMS
from ...batch_systems.resources import Resources
from ...errors import ConfigError
from ...plan.config import FIELDS
from ...plan.option import OptionGroup, flag, option
from ...plan.options import convert_values, options_of
from ...plan.request import JobRequest, Workload, split_values, workload_request
from .site import find_site, read_site

_STARTERS = tuple(dict.fromkeys(starter for system in SYSTEMS.values() for starter in system.starters))


@dataclass(frozen=True)
class SubmitOptions(OptionGroup):
    """How the batch job is made and submitted."""

    job_name: str | None = option(
        None, "Job name in the scheduler's tables.", "NAME", default_text="the job file's name"
    )
    sweep: tuple[str, ...] = option(
        (),
        "Train with each of these values, as a job array. Repeat the option to train "
        "with all combinations of several flags' values.",
        "FLAG=V,V,...",
        is_repeated=True,
        is_common=True,
    )
    launcher: str | None = option(
        None, "Program that starts the ranks.", default_text="mpirun; srun for a heterogeneous job", choices=_STARTERS
    )
    mpi: str | None = option(None, "MPI plugin for srun.", "PLUGIN", default_text="pmix or pmi2, to match mpi4py's MPI")
    sbatch: tuple[str, ...] = option(
        (), "Extra flag for the scheduler's submit command, such as --nice=10 for sbatch.", "FLAG", is_repeated=True
    )
    setup: tuple[str, ...] = option(
        (), "Shell command to run first, such as 'module load x'.", "LINE", is_repeated=True, is_common=True
    )
    scheduler: str = option(next(iter(SYSTEMS)), "Scheduler for which to write the script.", choices=tuple(SYSTEMS))
    site: Path | None = option(
        None,
        "TOML file with defaults for these flags.",
        "FILE",
        default_text="$MPITRAIN_SITE, ~/.config/mpitrain/site.toml",
    )
    follow: bool = option(False, "Print the log until the job ends.", has_negative=False, is_common=True)
    dry_run: bool = option(False, "Print the script without submitting it.", has_negative=False, is_common=True)


@dataclass(frozen=True)
class SubmitRequest:
    """A batch job to submit.

    Attributes:
        resources: The resources that the job requests.
        options: How the job is made and submitted.
        workload: The work that the ranks execute.
        points: The combinations of values of a sweep; each of them is run by one array task.

    Raises:
        ConfigError: The values of a point contradict the other options.
    """

    resources: Resources
    options: SubmitOptions
    workload: Workload
    points: tuple[Point, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.workload, JobRequest):
            for point in self.points:
                self.workload.with_options(**split_values(FIELDS, point.values)[0])


def submit_flags() -> list[click.Option]:
    """Return the flags of ``mpitrain submit``, without the flags of the run."""
    return [*options_of(Resources), *options_of(SubmitOptions)]


def read_submit_options(values: Mapping[str, Any]) -> tuple[Resources, SubmitOptions]:
    """Return the options of a batch job; values in the site file replace defaults.

    Args:
        values: The options that the user has set, converted, by name.

    Raises:
        ConfigError: The site file or a value is not valid, or options contradict each other.
    """
    site = find_site(values.get("site"))
    defaults = {} if site is None else read_site(site, submit_flags())
    names = [field.name for field in fields(Resources)]
    resources, others = split_values(names, {**defaults, **values})
    request = Resources(**resources)
    unused = [name for name in names if name.startswith("ps_") and name in values and not request.ps_nodes]
    if unused:
        raise ConfigError(f"{flag(unused[0])} requires server nodes; add --ps-nodes, or remove {flag(unused[0])}")
    return request, SubmitOptions(**others)


def submit_request(target: Path | Sequence[str], values: Mapping[str, Any], is_job: bool = False) -> SubmitRequest:
    """Return the request to submit ``target``, made from values of options; see ``plan.request.workload_request``."""
    flags = submit_flags()
    names = [str(flag.name) for flag in flags]
    own, others = split_values(names, values)
    workload = workload_request(target, others, names, is_job)
    return SubmitRequest(*read_submit_options(convert_values(flags, own)), workload)
