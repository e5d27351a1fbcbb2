"""``init``, ``shutdown``, and the functions that return facts about ranks and the build."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from typing import Any

from ..backend.members import create_comm, start_with_threads
from ..comm.mpi import MPI
from . import world
from .process_sets import ProcessSet, global_process_set, take
from .settings import from_environment
from .world import World, current, is_initialized

__all__ = """
    ccl_built cross_rank cross_size cuda_built ddl_built gloo_built gloo_enabled init is_homogeneous is_initialized
    local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank rocm_built shutdown size
    start_timeline stop_timeline
""".split()


def init(
    comm: MPI.Intracomm | Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Start MPI and the engine; do nothing if they are running. Collective over the ranks of ``comm``.

    Args:
        comm: All ranks of the program: ranks of MPI's world, or a communicator; None for the world.
        process_sets: Sets to add. ``"dynamic"`` is accepted: sets can always be added later.

    Raises:
        LaunchError: MPI cannot be started.
        ValueError: The process sets are not valid, or given although the engine runs; or this rank is not in ``comm``.
    """
    sets: list[Any] = [] if process_sets is None or process_sets == "dynamic" else list(process_sets)
    if is_initialized():
        if any(process_set.process_set_id is None for process_set in sets):
            raise ValueError("init has been called before; call add_process_set to add process sets")
        return
    everyone = start_with_threads("mpitrain.horovod")
    settings = from_environment(os.environ)
    started = World(_duplicate(everyone, comm), settings)
    world.replace(started)
    global_process_set.ranks = list(range(started.size))
    global_process_set.mpi_comm = comm if isinstance(comm, MPI.Comm) else None
    atexit.unregister(_at_exit)
    atexit.register(_at_exit, os.getpid())  # the functions of ``process_end`` are called after it
    if settings.without_effect and started.rank == 0:
        print(f"mpitrain: these variables have no effect: {', '.join(settings.without_effect)}", file=sys.stderr)
    take(sets)


def _duplicate(everyone: MPI.Intracomm, comm: MPI.Intracomm | Sequence[int] | None) -> MPI.Intracomm:
    if comm is None or (not isinstance(comm, MPI.Comm) and not list(comm)):
        return everyone.Dup()
    if isinstance(comm, MPI.Comm):
        return comm.Dup()
    ranks = list(comm)
    if everyone.rank not in ranks:
        raise ValueError(f"init(comm={ranks}): rank {everyone.rank} is not one of these ranks; it must not call init")
    return create_comm(everyone, ranks)


def _at_exit(pid: int) -> None:
    if os.getpid() == pid and not MPI.Is_finalized():
        shutdown()


def shutdown() -> None:
    """End the engine. Pending operations fail, also on the other ranks. Local."""
    if is_initialized():
        ended = current()
        world.replace(None)
        ended.close()


def rank() -> int:
    """Return the number of this rank."""
    return current().rank


def size() -> int:
    """Return the number of ranks."""
    return current().size


def local_rank() -> int:
    """Return the number of this rank on its host."""
    return current().local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return current().local_size


def cross_rank() -> int:
    """Return the number of this rank's host among the hosts that have a rank with the same local rank."""
    return current().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with the same local rank."""
    return current().cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks."""
    return current().is_homogeneous


def mpi_threads_supported() -> bool:
    """Return True: ``init`` fails if threads may not call MPI.

    Raises:
        ValueError: ``init`` has not been called.
    """
    current()
    return True


def mpi_built() -> bool:
    """Return True: the ranks communicate over MPI."""
    return True


mpi_enabled = mpi_built


def gloo_built() -> bool:
    """Return False: the ranks communicate only over MPI, and CUDA tensors are copied through host memory."""
    return False


gloo_enabled = ddl_built = ccl_built = cuda_built = rocm_built = gloo_built


def nccl_built() -> int:
    """Return 0, like the others."""
    return 0


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Complete the current timeline, if any, and record the engine's activity in a new file on the first rank. Local.

    Args:
        mark_cycles: Whether to record the ends of negotiations, too.

    Raises:
        ValueError: ``init`` has not been called.
    """
    if current().rank == 0:
        current().timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """Complete the file of the timeline. Local.

    Raises:
        ValueError: ``init`` has not been called.
    """
    current().timeline.stop()
