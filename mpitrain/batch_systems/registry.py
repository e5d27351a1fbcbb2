"""The batch systems that ``mpitrain submit`` supports."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from .base import BatchSystem
from .flux import Flux
from .lsf import Lsf
from .pbs import Pbs
from .slurm import Slurm

# By name. The first is the default of --scheduler.
SYSTEMS: dict[str, BatchSystem] = {system.name: system for system in (Slurm(), Pbs(), Lsf(), Flux())}


def current_job_ids(environ: Mapping[str, str]) -> set[str]:
    """Return the ids of the batch job that a process with this environment is part of."""
    return {job_id for system in SYSTEMS.values() for job_id in system.current_ids(environ)}


def array_index(environ: Mapping[str, str]) -> str:
    """Return the index of the element of a job array that this environment describes; empty if it describes none."""
    indices = (environ.get(system.index_variable, "") for system in SYSTEMS.values() if system.index_variable)
    return next((index for index in indices if index.isdigit()), "")


def allocated_ranks(environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks of the allocation that this environment describes; None if it describes none."""
    counts = (system.allocated_ranks(environ) for system in SYSTEMS.values())
    return next((count for count in counts if count is not None), None)


def allocation(environ: Mapping[str, str]) -> BatchSystem | None:
    """Return the batch system of the allocation that ``mpirun`` recognizes in this environment, or None."""
    systems = (system for system in SYSTEMS.values() if system.allocation_variable)
    return next((system for system in systems if system.allocation_variable in environ), None)


def allocated_hosts(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the hosts of this environment's allocation and their numbers of ranks; empty if no hosts are known."""
    return next((hosts for system in SYSTEMS.values() if (hosts := system.allocated_hosts(environ))), [])


def remote_agent(environ: Mapping[str, str]) -> str | None:
    """Return the program that runs commands on the hosts of this environment's allocation; None if it is ``ssh``."""
    systems = (system for system in SYSTEMS.values() if system.allocation_variable in environ)
    return next((system.remote_agent for system in systems if system.remote_agent), None)


def restart_arguments(environ: Mapping[str, str]) -> str:
    """Return ``BatchSystem.restart_arguments`` of this environment's allocation; empty if there are none."""
    systems = (system for system in SYSTEMS.values() if system.allocation_variable in environ)
    return next((system.restart_arguments for system in systems if system.restart_arguments), "")


def end_of_time(
    limit_s: float | None, environ: Mapping[str, str] = os.environ, now: float | None = None
) -> float | None:
    """Return the earliest known time limit of a run, in seconds since the epoch, or None. May query the batch system.

    Args:
        limit_s: The user's limit in seconds from now, or None.
        environ: The environment, where batch systems or ``job.sh.j2`` set the end of the job.
        now: Current time; None for the clock.
    """
    ends = [system.end_time(environ) for system in SYSTEMS.values()]
    if limit_s is not None:
        ends.append((time.time() if now is None else now) + limit_s)
    if (end := environ.get("MPITRAIN_END_TIME", "")).isdigit():
        ends.append(float(end))
    return min((end for end in ends if end is not None), default=None)
