"""The batch systems that ``mpitrain submit`` supports."""

from __future__ import annotations

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


def allocated_ranks(environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks of the allocation that this environment describes; None if it describes none."""
    counts = (system.allocated_ranks(environ) for system in SYSTEMS.values())
    return next((count for count in counts if count is not None), None)


def is_allocation(environ: Mapping[str, str]) -> bool:
    """Return whether ``mpirun`` recognizes an allocation in this environment, and takes its hosts from it."""
    return any(system.allocation_variable in environ for system in SYSTEMS.values() if system.allocation_variable)
