"""Sums by NCCL, from GPU to GPU: each worker needs one of its own."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..comm.hierarchy import Hierarchy
from ..cuda.gpu import Gpu, identify
from ..cuda.stream import Stream
from ..mpi import MPI
from ..params import Array
from ..plan import Bucket
from .way import agree

with warnings.catch_warnings():  # whether it is there is told where it is asked for
    warnings.simplefilter("ignore")
    from cupy.cuda import nccl

_LIMIT_S = 120.0  # for workers to find each other, which takes seconds


class Nccl:
    """See ``Way``."""

    def __init__(self, hierarchy: Hierarchy, gpu: Gpu, vector: Array, buckets: Sequence[Bucket]) -> None:
        comm = hierarchy.comm
        self._gpu, self._vector, self._buckets = gpu, vector, buckets
        taken = comm.allgather(identify()[gpu.index])
        agree(hierarchy, _problem(taken))
        name: Any = comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None)
        problem = ""
        with gpu.here(), _time_limit():
            self._stream = Stream()
            try:
                self._comm = nccl.NcclCommunicator(comm.size, name, comm.rank)
            except Exception as error:
                problem = f"NCCL says: {error}"
            agree(hierarchy, problem)
        self._type = {np.dtype(np.float32): nccl.NCCL_FLOAT32, np.dtype(np.float64): nccl.NCCL_FLOAT64}[vector.dtype]

    def start(self, index: int) -> None:
        self._stream.after(self._gpu.compute.mark())
        part: Any = self._vector[self._buckets[index].lo : self._buckets[index].hi]
        place, stream = part.data.ptr, self._stream.own.ptr
        self._comm.allReduce(place, place, part.size, self._type, nccl.NCCL_SUM, stream)

    def finish(self) -> None:
        self._gpu.compute.after(self._stream.mark())

    def free(self) -> None:
        with self._gpu.here():
            self._stream.wait()
            self._comm.destroy()


def _problem(taken: list[str]) -> str:
    if not nccl.available:
        return "NCCL is not installed (pip install nvidia-nccl-cu13, or cu12)"
    return "" if len(set(taken)) == len(taken) else "workers share a GPU, and NCCL wants one for each"


@contextmanager
def _time_limit() -> Iterator[None]:
    """End the run where workers do not find each other: NCCL itself waits for ever."""

    def end() -> None:
        line = f"NCCL does not come up within {_LIMIT_S:.0f} s: give --gpu-transport host, or see NCCL_DEBUG=INFO"
        print(f"mpitrain: {line}", file=sys.__stderr__, flush=True)
        MPI.COMM_WORLD.Abort(1)

    timer = threading.Timer(_LIMIT_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
