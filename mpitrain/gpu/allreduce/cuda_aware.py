"""Sums with a CUDA-aware MPI library: each worker sums one part of each bucket."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...comm.hierarchy import Hierarchy
from ...comm.mpi import MPI, mpi_type
from ...core.layout import Array
from ...core.ranges import Bucket, aligned_range
from .. import ops as launch
from ..device import Gpu
from .transport import TransportUnavailable, agree

# Environment variables with the value 1 if CUDA support is enabled, for libraries without a query function.
_ENABLED = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "PSM2_CUDA")


class CudaAwareTransport:
    """``GpuTransport`` by a CUDA-aware MPI library. Sums are taken in the order of the workers."""

    name = "cuda-aware"

    def __init__(self, hierarchy: Hierarchy, gpu: Gpu, vector: Array, buckets: Sequence[Bucket]) -> None:
        agree(hierarchy, "" if _is_cuda_aware() else "this MPI library does not report CUDA support")
        self._comm = hierarchy.comm.Dup()
        self._gpu, self._vector = gpu, vector
        self._type = mpi_type(vector.dtype)
        n, rank = self._comm.size, self._comm.rank
        self._parts = [[aligned_range(lo, hi, worker, n) for worker in range(n)] for lo, hi in buckets]
        with gpu.activate():
            self._in_order = gpu.copy_of(np.arange(n))
            self._received = [gpu.empty((n, _length(parts[rank])), vector.dtype) for parts in self._parts]
        self._events: list[Any] = [None] * len(buckets)
        self._requests: list[MPI.Request] = []
        self._started = 0
        self._try(hierarchy)

    def start(self, index: int) -> None:
        self._events[index] = self._gpu.compute.record(self._events[index])
        self._started = index + 1
        while len(self._requests) < self._started and self._events[len(self._requests)].done:
            self._post()

    def finish(self) -> None:
        while len(self._requests) < self._started:
            self._events[len(self._requests)].synchronize()
            self._post()
        rank = self._comm.rank
        for index, request in enumerate(self._requests):
            request.Wait()
            lo, hi = self._parts[index][rank]
            if lo < hi:
                launch.sum_rows(self._received[index], self._in_order, 0, hi - lo, 1.0, self._vector[lo:hi])
        self._gpu.compute.wait()  # MPI does not order its work with streams
        for parts in self._parts[: self._started]:
            gathered = [self._vector, _counts(parts), self._type]
            self._comm.Allgatherv(MPI.IN_PLACE, gathered)
        self._requests.clear()

    def free(self) -> None:
        self._comm.Free()

    def _post(self) -> None:
        """Send every worker its part of the next bucket."""
        index = len(self._requests)
        received = self._received[index]
        count = received.shape[1]
        places = [count] * len(received), [count * worker for worker in range(len(received))]
        sent = [self._vector, _counts(self._parts[index]), self._type]
        self._requests.append(self._comm.Ialltoallv(sent, [received, places, self._type]))

    def _try(self, hierarchy: Hierarchy) -> None:
        """Check that sums are correct. Collective over the workers.

        Raises:
            TransportUnavailable: The sums are wrong on some worker.
        """
        problem = ""
        with self._gpu.activate():
            self._vector[...] = 1
            for index in range(len(self._parts)):
                self.start(index)
            self.finish()
            sums = np.empty(self._vector.shape, self._vector.dtype)
            self._gpu.download(self._vector, sums)
            self._vector[...] = 0
        if not (sums == self._comm.size).all():
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


def _length(ends: tuple[int, int]) -> int:
    return ends[1] - ends[0]


def _counts(parts: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [_length(ends) for ends in parts], [lo for lo, _ in parts]
