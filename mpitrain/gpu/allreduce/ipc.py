"""Sums among the GPUs of one node through CUDA IPC; several workers may share a GPU.

Each worker sums one part of all vectors, in the order of the workers. It copies the other parts from the workers that
have summed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...comm.hierarchy import Hierarchy
from ...comm.phase_barrier import PhaseBarrier
from ...core.layout import Array
from ...core.ranges import Bucket, aligned_range
from ...errors import DeviceError
from .. import ops as launch
from ..device import Gpu
from ..ipc_memory import ExportedMemory, OpenedMemory
from .transport import TransportUnavailable, agree


class IpcTransport:
    """``GpuTransport`` through CUDA IPC."""

    name = "ipc"

    def __init__(self, hierarchy: Hierarchy, gpu: Gpu, vector: Array, buckets: Sequence[Bucket]) -> None:
        agree(hierarchy, "" if hierarchy.n_nodes == 1 else "workers are on several nodes or cannot share memory")
        node = hierarchy.node
        self._node, self._gpu, self._vector = node, gpu, vector
        self._opened: list[OpenedMemory] = []
        with gpu.activate():
            self._agree(hierarchy, self._open())
            self._in_order = gpu.copy_of(np.arange(node.size))
            self._parts = [[aligned_range(lo, hi, rank, node.size) for rank in range(node.size)] for lo, hi in buckets]
            longest = max(hi - lo for parts in self._parts for lo, hi in parts)
            self._rows = gpu.empty((node.size, longest), vector.dtype)
        self._barrier = PhaseBarrier(hierarchy.shared, hierarchy.cores)
        self._phase = 0
        self._events: list[Any] = [None] * len(buckets)

    def start(self, index: int) -> None:
        lo, hi = self._parts[index][0][0], self._parts[index][-1][1]
        self._gpu.compute.copy(self._vector[lo:hi], self._given[self._node.rank][lo:hi])
        self._events[index] = self._gpu.compute.record(self._events[index])

    def finish(self) -> None:
        for index, parts in enumerate(self._parts):
            self._events[index].synchronize()
            self._wait_for_node()
            self._sum(*parts[self._node.rank])
            self._gpu.compute.wait()
            self._wait_for_node()
            for (lo, hi), sums in zip(parts, self._sums, strict=True):
                if lo < hi:
                    self._gpu.compute.copy(sums[lo:hi], self._vector[lo:hi])

    def free(self) -> None:
        with self._gpu.activate():
            self._gpu.compute.wait()
            self._node.Barrier()
            for opened in self._opened:
                opened.close()
            self._node.Barrier()

    def _sum(self, lo: int, hi: int) -> None:
        """Sum this worker's part of all vectors."""
        if lo == hi:
            return
        for row, given in zip(self._rows, self._given, strict=True):
            self._gpu.compute.copy(given[lo:hi], row[: hi - lo])
        launch.sum_rows(self._rows, self._in_order, 0, hi - lo, 1.0, self._sums[self._node.rank][lo:hi])

    def _open(self) -> str:
        """Open all workers' memory, for their vectors and their sums. Collective; returns the problem, if any."""
        size, dtype = self._vector.size, self._vector.dtype
        nbytes, problem, own = 2 * size * dtype.itemsize, "", None
        try:
            own = ExportedMemory(nbytes)
        except DeviceError as error:
            problem = str(error)
        handles: list[bytes | None] = self._node.allgather(None if own is None else own.handle)
        self._given, self._sums = [], []
        for rank, handle in enumerate(handles):
            memory: Any = own
            if own is None or handle is None:
                return problem or "CUDA IPC failed on another worker"
            if rank != self._node.rank:
                try:
                    memory = OpenedMemory(handle, nbytes, self._gpu.index)
                except DeviceError as error:
                    return str(error)
                self._opened.append(memory)
            given, sums = memory.array((2, size), dtype)
            self._given.append(given)
            self._sums.append(sums)
        return ""

    def _agree(self, hierarchy: Hierarchy, problem: str) -> None:
        """Call ``agree``; on failure close memory of other workers before they free it."""
        try:
            agree(hierarchy, problem)
        except TransportUnavailable:
            for opened in self._opened:
                opened.close()
            self._node.Barrier()
            raise

    def _wait_for_node(self) -> None:
        self._phase += 1
        self._barrier.publish(self._phase)
        self._barrier.wait(self._phase)
