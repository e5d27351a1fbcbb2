"""The interface of a batch system."""

from __future__ import annotations

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from ..errors import ConfigError
from ..plan.option import flag
from .job import Batch
from .resources import Resources

_QUERY_TIMEOUT_S = 10.0


class Directives(NamedTuple):
    """The options of a job.

    Attributes:
        lines: Directives of the script, without their prefix.
        words: Arguments for the submit command that no directive can express.
    """

    lines: list[str]
    words: Sequence[str] = ()


class JobState(NamedTuple):
    """The state of a job.

    Attributes:
        name: The batch system's name of the state, such as ``OUT_OF_MEMORY``.
        has_ended: Whether the job neither waits nor runs.
        succeeded: Whether the job has ended without a failure.
        is_cleaning_up: Whether the job's processes have ended, but not the job.
        is_known: Whether the batch system still has a record of the job; if not, ``name`` is a text for the user.
    """

    name: str
    has_ended: bool
    succeeded: bool = False
    is_cleaning_up: bool = False
    is_known: bool = True


class BatchSystem(ABC):
    """A batch system (scheduler): how a job is described to it, submitted, queried and cancelled.

    To add a batch system, implement this class in a new module, and add it to ``registry.SYSTEMS``.

    Attributes:
        name: The value of ``--scheduler``; recorded in ``status.json``.
        title: The name in messages.
        prefix: The beginning of a directive in a script.
        submit_command: The command that submits a script; the script's path follows it.
        reads_stdin: Whether this command reads the script from standard input instead.
        id_pattern: A regular expression for the line of the command's output that has the job id, which is group 1.
        index_variable: The variable with the index of an array task; empty if there are no job arrays.
        first_index: The index of the first task of an array whose indexes start at 0 in ``--array``.
        id_variables: The variables that contain the job's id in a job.
        allocation_variable: The variable by which ``mpirun`` recognizes an allocation; empty if it does not.
        unsupported: The names of options in ``Resources`` that cannot be expressed.
        starters: The programs that can start the ranks; the first is the default.
        unreliable_starters: The starters that exit with status 0 even if they could not start a rank.
        cancel_signals: The signals that a script receives when its job is cancelled.
        sets_end_time: Whether a rank can find out by itself when its job reaches the time limit.
        requeue_status: The exit status with which the batch system requeues a job; 0 if it does not.
        node_check: A shell command that fails if a node of the job does not answer; empty if there is none.
        remote_agent: The program that runs a command on a host of the allocation, with host and command as its last
            arguments; empty if it is ``ssh``.
        restart_arguments: Arguments for the command with which ``mpirun`` starts its daemons in an allocation, such as
            ``srun``; with them it can start daemons while the earlier daemons on a failed node still count as running.
        restart_count_variable: The variable with the number of requeues; needed for ``node_check``.
        excludes_hosts: Whether a job can be kept off hosts.
        can_follow: Whether ``states`` and ``log_path`` suffice for ``--follow``.
        advice: Pairs of a word in the reason of a rejected job, and advice on how to fix it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    prefix: ClassVar[str]
    submit_command: ClassVar[tuple[str, ...]]
    reads_stdin: ClassVar[bool] = False
    id_pattern: ClassVar[str]
    index_variable: ClassVar[str] = ""
    first_index: ClassVar[int] = 0
    id_variables: ClassVar[tuple[str, ...]]
    allocation_variable: ClassVar[str] = ""
    unsupported: ClassVar[tuple[str, ...]] = ()
    starters: ClassVar[tuple[str, ...]] = ("mpirun",)
    unreliable_starters: ClassVar[tuple[str, ...]] = ()
    cancel_signals: ClassVar[tuple[str, ...]] = ("TERM",)
    sets_end_time: ClassVar[bool] = False
    requeue_status: ClassVar[int] = 0
    node_check: ClassVar[str] = ""
    remote_agent: ClassVar[str] = ""
    restart_arguments: ClassVar[str] = ""
    restart_count_variable: ClassVar[str] = ""
    excludes_hosts: ClassVar[bool] = False
    can_follow: ClassVar[bool] = False
    advice: ClassVar[tuple[tuple[str, str], ...]] = ()

    def check(self, batch: Batch) -> None:
        """Check that the batch system supports the options of a job.

        Raises:
            ConfigError: The batch system does not support an option.
        """
        if batch.in_tasks and not self.index_variable:
            raise ConfigError(
                f"--array and --sweep require job arrays, which {self.title} does not have; submit each run alone"
            )
        if batch.launch_flags and batch.starter != "mpirun":
            raise ConfigError(
                f"{batch.launch_flags[0]} requires --launcher mpirun, but {batch.starter} starts the ranks; remove one"
            )
        if batch.bad_hosts and not self.excludes_hosts:
            raise ConfigError(
                f"bad_hosts.txt of the run directory names {', '.join(batch.bad_hosts)}, which {self.title} cannot "
                "leave out; remove the file to use them again"
            )
        for name in self.unsupported:
            if getattr(batch.resources, name):
                raise ConfigError(
                    f"{flag(name)} is not supported for {self.title}; pass its own option with --sbatch, or remove "
                    f"{flag(name)}"
                )

    @abstractmethod
    def directives(self, batch: Batch) -> Directives:
        """Return the options of a job.

        Raises:
            ConfigError: An option is not supported, or a value is not valid in a directive.
        """

    @abstractmethod
    def command(self, batch: Batch) -> str:
        """Return the shell command that starts the ranks."""

    @abstractmethod
    def cancel_command(self, job_id: str, running: bool) -> list[str]:
        """Return the command that makes the script of a running job save and end, or that removes a waiting job."""

    def choose_starter(self, requested: str | None, resources: Resources) -> str:
        """Return the program that starts the ranks.

        Args:
            requested: The value of ``--launcher``; None if the batch system chooses.

        Raises:
            ConfigError: The requested program is not available.
        """
        if requested is not None and requested not in self.starters:
            raise ConfigError(f"--launcher {requested} is not available with --scheduler {self.name}; remove it")
        return requested or self.starters[0]

    def mpi_plugin(self, starter: str, requested: str | None, flavor: Callable[[], str]) -> str:
        """Return the MPI plugin that a starter needs; empty if it needs none.

        Args:
            requested: The value of ``--mpi``; None if this method chooses the plugin.
            flavor: Returns the flavor of the MPI library, such as ``openmpi``. Loads the library, and is
                therefore called only if the answer depends on the library.

        Raises:
            ConfigError: A plugin is requested, and the starter needs none.
        """
        if requested is not None:
            raise ConfigError(f"--mpi {requested} has no effect on {starter}, which starts the ranks; remove it")
        return ""

    def requeue_command(self, batch: Batch) -> str:
        """Return the shell command by which a job requeues itself; empty if there is none."""
        return ""

    def stop_signal(self, batch: Batch) -> str:
        """Return the signal for the program that starts the ranks, which then saves and stops."""
        return "TERM"

    def log_path(self, batch: Batch, job_id: str) -> Path:
        """Return the log of a job; the log directory if there are several logs, or the log's name is not known."""
        return batch.log_dir if batch.in_tasks else batch.log_dir / f"{job_id}.log"

    def task_id(self, job_id: str, index: int) -> str:
        """Return the id of an array's task; the array's id if the tasks have none."""
        return job_id

    def states(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        """Return the states of jobs; jobs that the batch system does not report here are left out."""
        return {}

    def end_time(self, environ: Mapping[str, str]) -> float | None:
        """Return when the job of a process with this environment reaches its time limit; None if this is not known.

        May query the batch system. Needed only if ``sets_end_time``; otherwise the script sets the end.

        Returns:
            Seconds since the epoch.
        """
        return None

    def current_ids(self, environ: Mapping[str, str]) -> set[str]:
        """Return the ids of the job that a process with this environment is part of."""
        return {environ[name] for name in self.id_variables if environ.get(name)}

    def allocated_hosts(self, environ: Mapping[str, str]) -> list[tuple[str, int]]:
        """Return the hosts of the allocation and their numbers of ranks; empty if these are not known."""
        return []

    def allocated_ranks(self, environ: Mapping[str, str]) -> int | None:
        """Return the number of ranks (tasks) of the allocation; None if it is not known."""
        return None

    def only_node(self, environ: Mapping[str, str]) -> str:
        """Return the name of the allocation's node if it has one node; empty if it has several, or is not known."""
        return ""

    def can_start_ranks(self, environ: Mapping[str, str]) -> bool:
        """Return whether the batch system answers, so that a launcher can use the allocation.

        Raises:
            LaunchError: The job of the allocation has ended.
        """
        return True


def query(
    words: Sequence[str], environ: Mapping[str, str] | None = None, timeout_s: float = _QUERY_TIMEOUT_S
) -> subprocess.CompletedProcess[str] | None:
    """Run a command that queries a batch system; return None if the command is not installed or does not answer in
    time.

    Args:
        environ: Variables to set for the command.
    """
    env = {**os.environ, **(environ or {})}
    try:
        return subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
