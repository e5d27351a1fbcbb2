"""Sums with a CUDA-aware MPI library: each worker sums one part of each bucket."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...comm.exchange import Exchange
from ...comm.hierarchy import Hierarchy
from ...comm.mpi import MPI
from ...comm.sum_order import order_of_groups
from ...core.layout import Array
from ...core.ranges import Bucket, aligned_range
from .. import ops as launch
from ..device import Gpu
from .transport import TransportUnavailable, agree

# Environment variables with the value 1 if CUDA support is enabled, for libraries without a query function.
_ENABLED = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "PSM2_CUDA")


class CudaAwareTransport:
    """``GpuTransport`` by a CUDA-aware MPI library. Sums are taken in the order of the workers, or by the tree."""

    name = "cuda-aware"

    def __init__(
        self, hierarchy: Hierarchy, gpu: Gpu, vectors: Sequence[Array], buckets: Sequence[Bucket], leaves: int | None
    ) -> None:
        agree(hierarchy, "" if _is_cuda_aware() else "this MPI library does not report CUDA support")
        self._comm = hierarchy.comm.Dup()
        self._gpu, self._vectors, self._vector = gpu, vectors, vectors[-1]
        n = self._comm.size
        counts, order = order_of_groups([[worker] for worker in range(n)], leaves)
        self._terms = sum(counts)
        with gpu.activate():
            self._order = gpu.copy_of(order)
            self._exchanges = [
                Exchange(
                    self._comm,
                    [aligned_range(lo, hi, worker, n) for worker in range(n)],
                    self._vector.dtype,
                    self._add,
                    gpu.empty,
                    counts,
                )
                for lo, hi in buckets
            ]
        self._events: list[Any] = [None] * len(buckets)
        # Numbers of buckets whose gradients are enqueued, and whose exchange has begun.
        self._started = self._posted = 0
        self._try(hierarchy)

    def start(self, index: int) -> None:
        self._events[index] = self._gpu.compute.record(self._events[index])
        self._started = index + 1
        while self._posted < self._started and self._events[self._posted].done:
            self._post()

    def finish(self) -> None:
        while self._posted < self._started:
            self._events[self._posted].synchronize()
            self._post()
        for exchange in self._exchanges[: self._started]:
            exchange.finish(self._vector)
        self._gpu.compute.wait()  # MPI does not order its work with streams
        for exchange in self._exchanges[: self._started]:
            self._comm.Allgatherv(MPI.IN_PLACE, exchange.message(self._vector))
        self._posted = 0

    def free(self) -> None:
        self._comm.Free()

    def _post(self) -> None:
        """Send every worker its part of the next bucket."""
        self._exchanges[self._posted].start(*self._vectors)
        self._posted += 1

    def _add(self, rows: Array, out: Array) -> None:
        launch.sum_rows(rows, self._order, 0, rows.shape[1], 1.0, out)

    def _try(self, hierarchy: Hierarchy) -> None:
        """Check that sums are correct. Collective over the workers.

        Raises:
            TransportUnavailable: The sums are wrong on some worker.
        """
        problem = ""
        with self._gpu.activate():
            for vector in self._vectors:
                vector[...] = 1
            for index in range(len(self._exchanges)):
                self.start(index)
            self.finish()
            sums = np.empty(self._vector.shape, self._vector.dtype)
            self._gpu.download(self._vector, sums)
            for vector in self._vectors:
                vector[...] = 0
        if not (sums == self._terms).all():
            problem = "this MPI library reports CUDA support, but its sums of GPU memory are wrong"
        try:
            agree(hierarchy, problem)
        except TransportUnavailable:
            self.free()
            raise


def _is_cuda_aware() -> bool:
    """Return whether the MPI library in use reports CUDA support."""
    if any(os.environ.get(name) == "1" for name in _ENABLED):
        return True
    for path in _libraries():
        library = ctypes.CDLL(path)
        if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI
            return bool(library.MPIX_Query_cuda_support())
        if hasattr(library, "MPIX_GPU_query_support"):  # MPICH
            answer = ctypes.c_int(0)
            return library.MPIX_GPU_query_support(0, ctypes.byref(answer)) == 0 and bool(answer.value)
    return False


def _libraries() -> list[str]:
    """Return the paths of the MPI libraries that this process has loaded."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libmpi" in line}
    return sorted(path for path in paths if ".so" in path)
