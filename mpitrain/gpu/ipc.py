"""Sums among the GPUs of one node, which read each other's memory (CUDA IPC); several workers may share a GPU.

Each worker sums a part of all vectors, in the order of the workers, and copies the other parts from those who summed
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from ..comm.average import part
from ..comm.board import Board
from ..comm.hierarchy import Hierarchy
from ..cuda import launch
from ..cuda.gpu import Gpu
from ..params import Array
from ..plan import Bucket
from .way import agree


class Ipc:
    """See ``Way``."""

    def __init__(self, hierarchy: Hierarchy, gpu: Gpu, vector: Array, buckets: Sequence[Bucket]) -> None:
        agree(hierarchy, "" if hierarchy.n_nodes == 1 else "workers are on several nodes, or share no memory")
        node = hierarchy.node
        self._node, self._gpu, self._vector = node, gpu, vector
        self._opened: list[int] = []
        with gpu.here():
            agree(hierarchy, self._open())
            self._in_order = gpu.copy_of(np.arange(node.size))
            self._parts = [[part(lo, hi, rank, node.size) for rank in range(node.size)] for lo, hi in buckets]
            longest = max(hi - lo for parts in self._parts for lo, hi in parts)
            self._rows = gpu.empty((node.size, longest), vector.dtype)
        self._board = Board(hierarchy.shared, hierarchy.cores)
        self._phase = 0
        self._events: list[Any] = [None] * len(buckets)

    def start(self, index: int) -> None:
        lo, hi = self._parts[index][0][0], self._parts[index][-1][1]
        self._gpu.compute.copy(self._vector[lo:hi], self._given[self._node.rank][lo:hi])
        self._events[index] = self._gpu.compute.mark(self._events[index])

    def finish(self) -> None:
        for index, parts in enumerate(self._parts):
            self._events[index].synchronize()
            self._meet()
            self._sum(*parts[self._node.rank])
            self._gpu.compute.wait()
            self._meet()
            for (lo, hi), sums in zip(parts, self._sums, strict=True):
                if lo < hi:
                    self._gpu.compute.copy(sums[lo:hi], self._vector[lo:hi])

    def free(self) -> None:
        with self._gpu.here():
            self._gpu.compute.wait()
            self._node.Barrier()
            for address in self._opened:
                runtime.ipcCloseMemHandle(address)
            self._node.Barrier()

    def _sum(self, lo: int, hi: int) -> None:
        """This worker's part of all vectors."""
        if lo == hi:
            return
        for row, given in zip(self._rows, self._given, strict=True):
            self._gpu.compute.copy(given[lo:hi], row[: hi - lo])
        launch.sum_rows(self._rows, self._in_order, 0, hi - lo, 1.0, self._sums[self._node.rank][lo:hi])

    def _open(self) -> str:
        """Get memory of all workers: what each gives, and what each has summed. Collective; returns what is wrong."""
        size, dtype = self._vector.size, self._vector.dtype
        problem, handle = "", b""
        try:
            own = cupy.cuda.Memory(2 * size * dtype.itemsize)  # not of the pool, whose memory has no handle of its own
            handle = bytes(runtime.ipcGetMemHandle(own.ptr))
        except runtime.CUDARuntimeError as error:
            problem = f"CUDA IPC says: {error}"
        handles: list[bytes] = self._node.allgather(handle)
        if not all(handles):
            return problem or "CUDA IPC does not work for another worker"
        self._given, self._sums = [], []
        for rank, handle in enumerate(handles):
            memory: Any = own
            if rank != self._node.rank:
                try:
                    address = runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
                except runtime.CUDARuntimeError as error:
                    return f"CUDA IPC says: {error}"
                self._opened.append(address)
                memory = cupy.cuda.UnownedMemory(address, own.size, self, self._gpu.index)
            both = cupy.ndarray((2, size), dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))
            self._given.append(both[0])
            self._sums.append(both[1])
        return ""

    def _meet(self) -> None:
        self._phase += 1
        self._board.publish(self._phase)
        self._board.wait(self._phase)
