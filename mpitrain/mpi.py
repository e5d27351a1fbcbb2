"""The one place that imports MPI. It does not start before ``start`` has seen that it can."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .errors import LaunchError

# Open MPI probes UCX when the first window is made and complains where there is no such device. Set before
# MPI starts, and only where the user has not chosen.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = True

from mpi4py import MPI  # noqa: E402

__all__ = ["MPI", "library_name", "mpi_type", "start"]

# How each launcher tells how many ranks it started.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    ("MPI_LOCALNRANKS", "MPICH's or Intel MPI's mpirun"),
    ("PMI_SIZE", "a PMI launcher (MPICH's or Intel MPI's mpirun, or srun)"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
)


def start() -> MPI.Intracomm:
    """Start MPI, if it has not started, and return its world; collective.

    Raises:
        LaunchError: The launcher started several ranks, and belongs to another MPI than mpi4py's.
    """
    # MPICH ends the process with a message of its own where it finds Open MPI's launcher: look first.
    if "OMPI_COMM_WORLD_SIZE" in os.environ and "Open MPI" not in MPI.Get_library_version():
        check_launcher(os.environ, 1)
    if not MPI.Is_initialized():
        MPI.Init_thread()
    check_launcher(os.environ, MPI.COMM_WORLD.size)
    return MPI.COMM_WORLD


def check_launcher(environ: Mapping[str, str], size: int) -> None:
    """Refuse to train N times alone where a launcher of another MPI started N ranks.

    Raises:
        LaunchError: The environment tells of more ranks than MPI, where ``size`` is 1.
    """
    if size > 1:
        return
    for variable, launcher in _LAUNCHERS:
        started = environ.get(variable, "")
        if started.isdigit() and int(started) > 1:
            raise LaunchError(
                f"{launcher} started {started} ranks, but each believes that it is alone: "
                f"mpi4py uses {library_name()}. "
                "Start them with that library's own mpirun ('mpitrain run -n N JOB' finds it), "
                "or with srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH, Intel MPI)"
            )


def launched_rank(environ: Mapping[str, str]) -> int:
    """The rank that the launcher gave this process, for speaking once where MPI does not know it."""
    for variable in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        if environ.get(variable, "").isdigit():
            return int(environ[variable])
    return 0


def library_name() -> str:
    """Make and version of the MPI library, such as ``Open MPI v5.0.11``."""
    text = MPI.Get_library_version().strip("\0 \n")
    if text.startswith("MPICH"):
        return " ".join(text.splitlines()[0].replace("Version:", "").split())
    return text.splitlines()[0].split(",")[0].replace("(R)", "").replace(" Library", "").removesuffix(" for Linux* OS")


def mpi_type(dtype: object) -> MPI.Datatype:
    """The MPI type of a NumPy type's elements."""
    return MPI._typedict[dtype.char]  # type: ignore[attr-defined]
