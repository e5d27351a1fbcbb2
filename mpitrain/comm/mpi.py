"""The one place that imports MPI. It does not start before ``start`` has seen that it can."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

from ..errors import LaunchError

# Open MPI probes UCX when the first window is made and complains where there is no such device. Set before
# MPI starts, and only where the user has not chosen.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")
# Open MPI does not start without one, as in containers and under some schedulers; any will do, there or not.
os.environ.setdefault("HOME", "/")

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
    # Libraries end the process, or say a page, where they find another make's launcher: look first.
    if is_foreign_launcher(os.environ, MPI.Get_library_version()):
        check_launcher(os.environ, 1)
    if not MPI.Is_initialized():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of launchers; what follows says it with the mend
            MPI.Init_thread()
    check_launcher(os.environ, MPI.COMM_WORLD.size)
    return MPI.COMM_WORLD


def is_foreign_launcher(environ: Mapping[str, str], library: str) -> bool:
    """Whether the launcher talks to its ranks in a way that this library surely does not know."""
    if "Open MPI" in library:
        # Version 5 knows PMIx only; version 4 may have been built with Slurm's PMI.
        return "Open MPI v5" in library and "PMI_RANK" in environ and "PMIX_RANK" not in environ
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return True
    return "PMIX_RANK" in environ and "PMI_RANK" not in environ and "pmix" not in library.lower()


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
                f"{'srun' if _by_srun(environ) else launcher} started {started} ranks, but each believes that it is "
                f"alone: mpi4py uses {library_name()}. {_advice(environ)}"
            )


def _by_srun(environ: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this rank itself; launchers in an allocation start their own helpers with it."""
    by_mpirun = "MPI_LOCALNRANKS" in environ or "OMPI_COMM_WORLD_SIZE" in environ
    return "SLURM_STEP_NUM_TASKS" in environ and not by_mpirun


def _advice(environ: Mapping[str, str]) -> str:
    plugin = "pmix" if "Open MPI" in library_name() else "pmi2"
    if _by_srun(environ):
        return (
            f"Give srun --mpi={plugin} (srun --mpi=list shows what this cluster has), "
            "or in place of srun and train say 'mpitrain run JOB'"
        )
    return (
        "Start them with that library's own mpirun ('mpitrain run -n N JOB' finds it), "
        f"or in a Slurm allocation with srun --mpi={plugin}"
    )


def library_name() -> str:
    """Make and version of the MPI library, such as ``Open MPI v5.0.11``."""
    text = MPI.Get_library_version().strip("\0 \n")
    if text.startswith("MPICH"):
        return " ".join(text.splitlines()[0].replace("Version:", "").split())
    return text.splitlines()[0].split(",")[0].replace("(R)", "").replace(" Library", "").removesuffix(" for Linux* OS")


def mpi_type(dtype: object) -> MPI.Datatype:
    """The MPI type of a NumPy type's elements."""
    return MPI._typedict[dtype.char]  # type: ignore[attr-defined]
