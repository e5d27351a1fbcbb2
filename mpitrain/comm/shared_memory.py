"""Arrays shared by the ranks of a node, in MPI windows."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from ..core.layout import PAGE, Array, Shape, page_aligned
from .mpi import MPI

_SHM = "/dev/shm"  # MPI libraries allocate shared windows in it on Linux


def sharing_problem(node: MPI.Intracomm, nbytes: int) -> str:
    """Return why ``node`` cannot share ``nbytes`` of memory, or an empty string. Collective over ``node``."""
    if node.size == 1:
        return ""
    problem = ""
    if node.rank == 0 and os.path.isdir(_SHM):
        # Touching more pages than /dev/shm can hold would kill the process with SIGBUS.
        stat = os.statvfs(_SHM)
        free = stat.f_bavail * stat.f_frsize
        if nbytes > free:
            problem = f"{nbytes:,} bytes of shared memory are needed, but {_SHM} has {free:,} free"
    problem = node.bcast(problem, root=0)
    if problem:
        return problem
    try:
        MPI.Win.Allocate_shared(PAGE if node.rank == 0 else 0, 1, MPI.INFO_NULL, node).Free()
    except MPI.Exception as error:
        return f"MPI cannot create shared windows: {error}"
    return ""


class SharedArrays:
    """Owner of the shared windows of one node's ranks.

    Every method is collective over ``node``. Arrays are valid until ``free``. A rank alone on its node gets private
    memory without a window. Access is by plain loads and stores; the caller orders them (see ``PhaseBarrier``).
    """

    def __init__(self, node: MPI.Intracomm) -> None:
        self.node = node
        self._windows: list[MPI.Win] = []

    def allocate(self, shape: Shape, dtype: Any) -> Array:
        """Return an array visible to all ranks of the node, page-aligned, with undefined contents.

        The memory is not written, so that each page is placed near the rank that first uses it.
        """
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if self.node.size == 1:
            return page_aligned(shape, dtype)
        # One extra page for alignment: MPICH and Intel MPI align to 64 bytes or less.
        win = MPI.Win.Allocate_shared(nbytes + PAGE if self.node.rank == 0 else 0, 1, MPI.INFO_NULL, self.node)
        self._windows.append(win)
        win.Lock_all(MPI.MODE_NOCHECK)  # a passive epoch for the window's lifetime, for loads and stores
        memory, _ = win.Shared_query(0)
        raw = np.frombuffer(memory, np.uint8)  # type: ignore[call-overload]
        # Ranks map the window at different addresses, but all use the same offset in it.
        offset = self.node.bcast(-raw.ctypes.data % PAGE, root=0)
        return raw[offset : offset + nbytes].view(dtype).reshape(shape)

    def free(self) -> None:
        """Free the windows. Collective over the node."""
        while self._windows:
            win = self._windows.pop()
            win.Unlock_all()
            win.Free()
