"""The variables that launchers set in the environment of their ranks; does not use MPI."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Mapping, MutableMapping

from ..core.activity import PAGE_VARIABLE, STACKS_VARIABLE
from ..core.cpus import SHOW_BINDING
from ..core.openblas import KERNELS
from .fork_server import FIRST
from .rank_status import RUN_DIR_VARIABLE

# Variables that ``mpitrain run`` passes to its ranks, besides the run directory.
RESTART_COUNT = "MPITRAIN_RESTART_COUNT"  # number of restarts so far
MAX_RESTARTS = "MPITRAIN_MAX_RESTARTS"
ATTEMPT = "MPITRAIN_ATTEMPT"  # identifier of this attempt
NETWORK = "MPITRAIN_NETWORK"  # the value of --network
KEEPS_STATE = "MPITRAIN_KEEPS_STATE"  # set if the newest state is kept in memory
# The number of ranks at the start of a run that may continue, or does, on another number.
FIRST_RANKS = "MPITRAIN_FIRST_RANKS"
STARTED_AT = "MPITRAIN_STARTED_AT"  # time at which ``mpitrain run`` was started, in seconds since the epoch
UCX_LOG_LEVEL = "UCX_LOG_LEVEL"
IDLE_SHARE = "MPITRAIN_IDLE_SHARE"  # the number of spare hosts divided by that of all hosts
# Variables of a restart.
FAILED_AT = "MPITRAIN_FAILED_AT"  # time of the interruption, in seconds since the epoch
FAILED_STEP = "MPITRAIN_FAILED_STEP"  # number of completed steps at the interruption
RESTARTS_SINCE = "MPITRAIN_RESTARTS_SINCE"  # number of restarts since the interruption

# Set in a rank, so that commands that it starts can leave the run: the rank's process and launch, and the names of the
# variables that ``mpitrain exec`` has set.
RANK = "MPITRAIN_RANK"
SET_FOR_PROGRAM = "MPITRAIN_SET_FOR_PROGRAM"

_OF_RUN: tuple[str, ...] = (
    RESTART_COUNT,
    MAX_RESTARTS,
    ATTEMPT,
    NETWORK,
    KEEPS_STATE,
    FIRST_RANKS,
    STARTED_AT,
    IDLE_SHARE,
    FIRST,
    FAILED_AT,
    FAILED_STEP,
    RESTARTS_SINCE,
)
_OF_RUN += (RANK, SET_FOR_PROGRAM, RUN_DIR_VARIABLE, PAGE_VARIABLE, STACKS_VARIABLE, SHOW_BINDING)
# What mpirun and srun set for a rank, and its user does not.
_OF_RANK: tuple[str, ...] = (
    "OMPI_",
    "PMIX_",
    "PMI_",
    "PRTE_",
    "HYDI_",
    "HYDRA_USER_PROVIDED_BINDING",
    "MPI_LOCAL",
    "SLURM_STEP",
)
_OF_RANK += ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID", "SLURM_CPU_BIND")
_OF_RANK += ("SLURM_SRUN_COMM_", "SLURM_LAUNCH_NODE_IPADDR")
_OF_USER = ("OMPI_MCA_", "OMPI_ALLOW_", "PMIX_MCA_", "PRTE_MCA_")
_READ_LATER = ("MPITRAIN_", *_OF_USER, "OPAL_", "GFORTRAN_UNBUFFERED_", UCX_LOG_LEVEL, "PATH", "PWD")
_MCA_OF_RANK = ("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs")
# Variables of Slurm's commands that are no property of a job.
_OF_SITE = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_EXIT_")

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


def mark_rank(environ: MutableMapping[str, str]) -> None:
    """Record in the environment that this process is a rank."""
    environ[RANK] = json.dumps([os.getpid(), *_launch(environ)])


def leave_outer_run(environ: MutableMapping[str, str]) -> None:
    """Leave the run whose rank has started this process; the rank itself stays in it.

    If another launcher has started this process in a rank, what that launcher has set stays.
    """
    if RANK not in environ:
        return
    pid, step, connection = json.loads(environ[RANK])
    if pid != os.getpid():
        own_step, own_connection = _launch(environ)
        leave_run(environ, is_rank=step != own_step or own_connection not in (0, connection))


def leave_run(environ: MutableMapping[str, str], is_rank: bool = False) -> None:
    """Remove what a run has set for the rank that this process is part of, if there is one; an allocation stays.

    Args:
        is_rank: Whether what a launcher has set stays, too.
    """
    if RANK not in environ and not is_launched(environ):
        return
    names = {*environ.get(SET_FOR_PROGRAM, "").split(","), *_OF_RUN}
    for name in list(environ):
        if name in names or (_is_of_launcher(name) and not is_rank):
            del environ[name]


def import_alike(first: Mapping[str, str], second: Mapping[str, str], kernels: str) -> bool:
    """Return whether modules that were imported in one environment are as if they had been imported in the other.

    Variables that launchers and ``mpitrain run`` set are read later, but for the kernels that OpenBLAS is to use.

    Args:
        kernels: The kernels that it uses.
    """
    return _read_by_imports(first, kernels) == _read_by_imports(second, kernels)


def _read_by_imports(environ: Mapping[str, str], kernels: str) -> dict[str, str]:
    """Return the variables that modules may read when they are imported."""
    read = {name: value for name, value in environ.items() if not name.startswith(_READ_LATER) and name != "_"}
    if environ.get(KERNELS, kernels).lower() != kernels.lower():
        read[KERNELS] = environ[KERNELS]
    # The mpirun of Open MPI's wheel adds its own folder.
    own, paths = os.path.realpath(f"{sys.prefix}/lib"), read.pop("LD_LIBRARY_PATH", "").split(":")
    read["LD_LIBRARY_PATH"] = ":".join(path for path in paths if os.path.realpath(path) != own)
    return {name: value for name, value in read.items() if not _is_of_launcher(name)}


def _is_of_launcher(name: str) -> bool:
    return name in _MCA_OF_RANK or (name.startswith(_OF_RANK) and not name.startswith(_OF_USER))


def leave_job(environ: MutableMapping[str, str]) -> None:
    """Remove what a batch job has set, too: Slurm passes variables such as SLURM_MEM_PER_NODE on to jobs."""
    leave_run(environ)
    for name in list(environ):
        if name == "MPITRAIN_END_TIME" or (name.startswith("SLURM_") and not name.startswith(_OF_SITE)):
            del environ[name]


def _launch(environ: Mapping[str, str]) -> tuple[list[str], int]:
    """Return what differs between launches: names, and the inode of the connection to MPICH's launcher; 0 if closed."""
    inode = 0
    with contextlib.suppress(KeyError, ValueError, OSError):
        connection = os.fstat(int(environ["PMI_FD"]))
        inode = connection.st_ino if stat.S_ISSOCK(connection.st_mode) else 0
    return [environ.get(name, "") for name in ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")], inode


def attempt_id(environ: Mapping[str, str]) -> str:
    """Return text that is the same on all ranks of one launch, and differs between launches; empty if there is none."""
    if identifier := environ.get(ATTEMPT):
        return identifier
    # A requeued Slurm job has the same job id, job step ids and PMIx namespaces as before.
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    parts = [environ[name] for name in ("PMIX_NAMESPACE",) if name in environ]
    parts += [environ.get(name, "0") for name in names if "SLURM_JOB_ID" in environ]
    return "-".join(parts)
