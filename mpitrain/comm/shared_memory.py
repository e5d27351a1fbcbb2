"""Arrays that the ranks of a node share, in MPI windows."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from ..core.layout import Array, Shape
from .mpi import MPI

_PAGE = 4096
_SHM = "/dev/shm"  # where every MPI in use backs shared windows on Linux


def sharing_problem(node: MPI.Intracomm, nbytes: int) -> str:
    """Why the ranks of ``node`` cannot share ``nbytes`` of memory; empty where they can. Collective over ``node``."""
    if node.size == 1:
        return ""
    problem = ""
    if node.rank == 0 and os.path.isdir(_SHM):
        # Touching more pages than /dev/shm can hold would kill the process with SIGBUS.
        stat = os.statvfs(_SHM)
        free = stat.f_bavail * stat.f_frsize
        if nbytes > free:
            problem = f"{nbytes:,} bytes of shared memory are needed and {free:,} free in {_SHM}"
    problem = node.bcast(problem, root=0)
    if problem:
        return problem
    try:
        MPI.Win.Allocate_shared(_PAGE if node.rank == 0 else 0, 1, MPI.INFO_NULL, node).Free()
    except MPI.Exception as error:
        return f"MPI has no shared windows here: {error}"
    return ""


def row_stride(size: int) -> int:
    """Elements from one row of a shared array to the next, so that each starts on a page of its own."""
    return -(-size // 1024) * 1024


class SharedArrays:
    """Owns the shared windows of one node's ranks.

    Every method is collective over ``node``. Arrays live until ``free``; no rank may touch one after that.
    A rank alone on its node gets private memory, and needs no window.
    Plain loads and stores reach the memory; ordering between ranks is the caller's (see ``PhaseBarrier``).
    """

    def __init__(self, node: MPI.Intracomm) -> None:
        self.node = node
        self._windows: list[MPI.Win] = []

    def allocate(self, shape: Shape, dtype: Any) -> Array:
        """One array that all ranks of the node see, starting on a page, with undefined contents.

        Nobody writes the memory here, so that a page comes to lie near the rank that first uses it.
        """
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if self.node.size == 1:
            raw = np.zeros(nbytes + _PAGE, np.uint8)
            offset = -raw.ctypes.data % _PAGE
            return raw[offset : offset + nbytes].view(dtype).reshape(shape)
        # The page more lets the array start on a page: MPICH and Intel MPI align to 64 bytes or less.
        win = MPI.Win.Allocate_shared(nbytes + _PAGE if self.node.rank == 0 else 0, 1, MPI.INFO_NULL, self.node)
        self._windows.append(win)
        win.Lock_all(MPI.MODE_NOCHECK)  # a passive epoch for as long as the window lives: loads and stores
        memory, _ = win.Shared_query(0)
        raw = np.frombuffer(memory, np.uint8)  # type: ignore[call-overload]
        # The same page offset on every rank, though each maps the window at an address of its own.
        offset = self.node.bcast(-raw.ctypes.data % _PAGE, root=0)
        return raw[offset : offset + nbytes].view(dtype).reshape(shape)

    def free(self) -> None:
        """Give the windows back; collective over the node."""
        while self._windows:
            win = self._windows.pop()
            win.Unlock_all()
            win.Free()
