"""Requests to submit a batch job, made by ``mpitrain submit`` and the Python API, and a site's defaults for them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from ...batch_systems.job import Point
from ...batch_systems.registry import SYSTEMS
from ...batch_systems.resources import Resources
from ...core.words import suggestion
from ...errors import ConfigError
from ...plan.config import FIELDS
from ...plan.launch_options import check_disk
from ...plan.option import OptionGroup, flag, option
from ...plan.options import convert, convert_values, options_of, read_toml_option
from ...plan.request import JobRequest, Workload, split_values, workload_request

VARIABLE = "MPITRAIN_SITE"
_COMMAND_LINE_ONLY = ("site", "dry_run", "follow", "sweep")  # flags that a site file cannot set
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
    stage_env: Path | None = option(
        None, "Copy the Python environment to FOLDER on a disk of every node, and start the ranks from there.", "FOLDER"
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_disk(self.stage_env)


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


def places(environ: Mapping[str, str]) -> list[Path]:
    """Return the default paths of the site file, the user's own first."""
    config = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "/nonexistent")) / ".config")
    return [Path(config) / "mpitrain" / "site.toml", Path("/etc/mpitrain/site.toml")]


def find_site(requested: Path | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the site file: as requested, else ``$MPITRAIN_SITE``, else the first default path that exists."""
    if requested is not None:
        return requested
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE])
    return next((path for path in places(environ) if path.is_file()), None)


def read_site(path: Path, options: Sequence[click.Option]) -> dict[str, Any]:
    """Return the values in a site file, converted, by option name.

    Raises:
        ConfigError: The file cannot be read, a key is not a flag of ``mpitrain submit``, or a value is not valid.
    """
    known = {str(option.name): option for option in options if option.name not in _COMMAND_LINE_ONLY}
    values = {}
    for key, value in read_toml_option(path, "--site").items():
        name = key.replace("-", "_")
        if name not in known:
            hint = suggestion(name, known, "; give flags of mpitrain submit, such as partition")
            raise ConfigError(f"--site {path}: no option {key!r}{hint}")
        try:
            values[name] = convert(known[name], value)
        except click.BadParameter as error:
            raise ConfigError(f"--site {path}: {key} is {value!r}: {error.message}") from error
    return values
