"""Requests to start ranks, made by the command line and the Python API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import click

from ..core.words import suggestion
from ..errors import ConfigError
from .config import FIELDS, RunConfig
from .launch_options import LaunchOptions
from .options import (
    CONFIG,
    convert_values,
    flag_words,
    group_words,
    options_of,
    read_config_file,
    run_options,
    without_overridden,
)
from .program import ProgramOptions, command_request, script_request
from .script import is_program, is_script


class Workload(Protocol):
    """The work that the ranks of a run execute; the launcher uses only this interface.

    Attributes:
        name: The name of the run in the run directory's name.
        command: The ``mpitrain`` command that every rank runs.
        words: The arguments of this command.
        run_dir: The run directory that was given, or None.
        join: The directory of the run of which it becomes a learner, or None.
        time_limit: Seconds that the run may take, or None.
        keeps_checkpoints: Whether restarts and later starts resume from checkpoints in the run directory.
        resumes: Whether a later start in the same run directory resumes the run without further options.
    """

    @property
    def name(self) -> str: ...

    @property
    def command(self) -> str: ...

    @property
    def words(self) -> list[str]: ...

    @property
    def run_dir(self) -> Path | None: ...

    @property
    def join(self) -> Path | None: ...

    @property
    def time_limit(self) -> float | None: ...

    @property
    def keeps_checkpoints(self) -> bool: ...

    @property
    def resumes(self) -> bool: ...

    def check_ranks(self, ranks: int) -> None:
        """Check that this number of ranks can execute the workload.

        Raises:
            ConfigError: This number of ranks cannot execute it.
        """

    def restarted(self, checkpoint: Path | None, time_limit: float | None) -> Workload:
        """Return the workload that the ranks execute after a restart.

        Args:
            checkpoint: The newest checkpoint, or None.
            time_limit: The seconds that are left, or None.
        """

    def with_options(self, **options: Any) -> Workload:
        """Return the workload with other options of the run, by their flat names; None is the default."""


@dataclass(frozen=True)
class JobRequest:
    """A job file, or a script that trains by itself, with the options of the run: a ``Workload``.

    Attributes:
        path: The file.
        options: The options of the run that were given, by their flat names.
        arguments: The arguments of the job function that were given; none for a script.
        script_arguments: The command line of a script; None for a job file.

    Raises:
        ConfigError: An option is not valid, or options contradict each other.
    """

    path: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    script_arguments: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("options", "arguments"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        _ = self.config  # check the options now

    @cached_property
    def config(self) -> RunConfig:
        """All options of the run."""
        return RunConfig.of(**self.options)

    command = "train"
    keeps_checkpoints = True

    @property
    def name(self) -> str:
        """The name of the job, or of the script."""
        return self.path.stem

    @property
    def run_dir(self) -> Path | None:
        return self.config.run.run_dir

    @property
    def join(self) -> Path | None:
        return self.config.run.join

    @property
    def time_limit(self) -> float | None:
        return self.config.run.time_limit

    @property
    def resumes(self) -> bool:
        return self.config.run.resume == "auto"

    @property
    def keeps_step(self) -> bool:
        """Whether a step of the run stays the same on fewer ranks, unless the job cannot have virtual workers."""
        explicit, mode = self.config.parallel.virtual_workers, self.config.mode
        by_default = mode.keeps_steps and explicit is None and self.script_arguments is None
        return by_default or (bool(explicit) and not mode.uses_servers)

    def check_ranks(self, ranks: int) -> None:
        self.config.check_ranks(ranks)

    def restarted(self, checkpoint: Path | None, time_limit: float | None) -> JobRequest:
        job = self
        if not self.resumes and checkpoint is not None:
            job = job.with_options(resume=str(checkpoint))
        return job if time_limit is None else job.with_options(time_limit=time_limit)

    @property
    def words(self) -> list[str]:
        """The arguments of ``mpitrain train``."""
        if self.script_arguments is not None:
            marked = ["--"] if self.script_arguments[:1] == ("--",) else []  # of two, commands remove the first one
            return [*flag_words(self.options), str(self.path), *marked, *self.script_arguments]
        return [str(self.path), *flag_words(self.options), *flag_words(self.arguments)]

    def with_options(self, **options: Any) -> JobRequest:
        merged = {**self.options, **options}
        return replace(self, options={name: value for name, value in merged.items() if value is not None})


@dataclass(frozen=True)
class LaunchRequest:
    """A run to start.

    Attributes:
        options: How the ranks are started.
        workload: The work that the ranks execute.
    """

    options: LaunchOptions
    workload: Workload

    @property
    def words(self) -> list[str]:
        """The arguments of ``mpitrain run``."""
        return [*group_words(self.options), *self.workload.words]


def launch_request(target: Path | Sequence[str], values: Mapping[str, Any], is_job: bool = False) -> LaunchRequest:
    """Return the request for a job file, script or command with keyword arguments; see ``workload_request``."""
    names = [field.name for field in fields(LaunchOptions)]
    own, others = split_values(names, values)
    options = LaunchOptions(**convert_values(options_of(LaunchOptions), own))
    return LaunchRequest(options, workload_request(target, others, names, is_job))


def workload_request(
    target: Path | Sequence[str], values: Mapping[str, Any], other_names: Iterable[str] = (), is_job: bool = False
) -> Workload:
    """Return the request for a job file, a script, or a command, with keyword arguments.

    Args:
        target: A file, or the words of a command.
        values: As for ``job_request``; for a program its options, and for a Python script also the script's flags.
        other_names: Names of arguments that the caller takes; they are suggested for mistyped names.
        is_job: Whether the file is known to be a job file.

    Raises:
        UserError: As for ``job_request``, or the program cannot be started.
    """
    if isinstance(target, Path) and (is_job or not is_program(target)):
        return job_request(target, values, other_names)
    known = options_of(ProgramOptions)
    own, others = split_values([str(option.name) for option in known], values)
    options = ProgramOptions(**convert_values(known, own))
    if isinstance(target, Path):
        return script_request(target, flag_words(others), options)
    if others:
        raise unknown_name(next(iter(others)), [*own, *other_names])
    return command_request(target, options)


def job_request(path: Path, values: Mapping[str, Any], other_names: Iterable[str] = ()) -> JobRequest:
    """Return the request for a job file or script with keyword arguments. Runs the job file.

    Args:
        values: Options of the run, ``config`` for a TOML file with more options, and the parameters of the job or the
            flags of the script. None leaves an option at its default.
        other_names: Names of arguments that the caller takes; they are suggested for mistyped names.

    Raises:
        ConfigError: A name is not known, or a value is not valid.
        JobError: The job file cannot be loaded.
    """
    own, others = split_values(["config"], values)
    run = run_options()
    parameters = None if is_script(path) else _parameters(path)
    if own:
        (file,) = convert_values([CONFIG], own).values()
        others = without_overridden(read_config_file(file, [*run, *(parameters or [])]), others) | others
    options, arguments = split_values(FIELDS, others)
    options = convert_values(run, options)
    if parameters is None:
        return JobRequest(path, options, script_arguments=tuple(flag_words(arguments)))
    _check_names(arguments, parameters, [*other_names, *FIELDS])
    return JobRequest(path, options, convert_values(parameters, arguments))


def split_values(names: Iterable[str], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments that are not None as two dicts: the arguments with these names, and the others."""
    chosen, others = set(names), {name: value for name, value in values.items() if value is not None}
    return {name: others.pop(name) for name in [*others] if name in chosen}, others


def unknown_name(name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a keyword argument that is neither a known option nor a known parameter."""
    hint = suggestion(name, known)
    return ConfigError(f"{name!r} is neither an option of a run nor a parameter of the job{hint}")


def _parameters(path: Path) -> list[click.Option]:
    """Run a job file, and return its parameters."""
    from .job import load_job_file
    from .options import job_options

    return job_options(path, load_job_file(path))


def _check_names(arguments: Mapping[str, Any], parameters: list[click.Option], options: list[str]) -> None:
    known = [str(parameter.name) for parameter in parameters]
    for name in arguments:
        if name not in known:
            raise unknown_name(name, [*known, *options])
    for parameter in parameters:
        if parameter.required and parameter.name not in arguments:
            raise ConfigError(f"the job requires a value for its parameter {parameter.name!r}")
