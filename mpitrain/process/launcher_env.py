"""The variables that launchers set in the environment of their ranks; does not use MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Variables that ``mpitrain run`` passes to its ranks, besides the run directory.
RESTART_COUNT = "MPITRAIN_RESTART_COUNT"  # number of restarts so far
MAX_RESTARTS = "MPITRAIN_MAX_RESTARTS"
ATTEMPT = "MPITRAIN_ATTEMPT"  # identifier of this attempt
NETWORK = "MPITRAIN_NETWORK"  # the value of --network
KEEPS_STATE = "MPITRAIN_KEEPS_STATE"  # set if the newest state is kept in memory
# Variables of a restart.
FAILED_AT = "MPITRAIN_FAILED_AT"  # time of the interruption, in seconds since the epoch
FAILED_STEP = "MPITRAIN_FAILED_STEP"  # number of completed steps at the interruption
RESTARTS_SINCE = "MPITRAIN_RESTARTS_SINCE"  # number of restarts since the interruption

# The rank number, in this order: set by Open MPI, by launchers with PMI (MPICH, Intel MPI, srun), by those with PMIx.
_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def set_home() -> None:
    """Set HOME if it is not set, as in containers and under some schedulers: Open MPI and its mpirun need it.

    Any path works, even a missing one.
    """
    os.environ.setdefault("HOME", "/")


def is_launched(environ: Mapping[str, str]) -> bool:
    """Return whether an MPI launcher started this process; variables of ``srun`` without PMI or PMIx do not count."""
    return any(name in environ for name in _RANK)


def launched_rank(environ: Mapping[str, str]) -> int:
    """Return the rank from the environment, to print messages once before MPI has started; 0 if unknown."""
    numbers = (environ.get(name, "") for name in (*_RANK, "SLURM_PROCID"))
    return next((int(rank) for rank in numbers if rank.isdigit()), 0)


def launched_size(environ: Mapping[str, str]) -> int:
    """Return the number of ranks that the launcher started; 1 if unknown."""
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), 1)


def attempt_id(environ: Mapping[str, str]) -> str:
    """Return text that is the same on all ranks of one launch, and differs between launches; empty if there is none."""
    if identifier := environ.get(ATTEMPT):
        return identifier
    # A requeued Slurm job has the same job id, job step ids and PMIx namespaces as before.
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    parts = [environ[name] for name in ("PMIX_NAMESPACE",) if name in environ]
    parts += [environ.get(name, "0") for name in names if "SLURM_JOB_ID" in environ]
    return "-".join(parts)
