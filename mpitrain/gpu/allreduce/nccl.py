"""Sums with NCCL between GPUs; each worker needs its own GPU."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...comm.hierarchy import Hierarchy
from ...core.layout import Array
from ...core.ranges import Bucket
from .. import nccl
from ..device import Gpu, identify
from ..stream import Stream
from .transport import agree

_LIMIT_S = 120.0  # time limit for workers to connect, which normally takes seconds


class NcclTransport:
    """``GpuTransport`` through NCCL."""

    name = "nccl"

    def __init__(self, hierarchy: Hierarchy, gpu: Gpu, vector: Array, buckets: Sequence[Bucket]) -> None:
        comm = hierarchy.comm
        self._gpu, self._vector, self._buckets = gpu, vector, buckets
        gpus = comm.allgather((os.uname().nodename, identify()[gpu.index]))
        agree(hierarchy, _problem(gpus))
        name: Any = comm.bcast(_unique_id() if comm.rank == 0 else None)
        agree(hierarchy, name if isinstance(name, str) else "")
        problem = ""
        with gpu.activate(), _time_limit(hierarchy):
            self._stream = Stream()
            try:
                self._comm = nccl.Communicator(comm.size, name, comm.rank)
            except Exception as error:
                problem = f"NCCL failed: {error}"
            agree(hierarchy, problem)
            self._comm.sum(gpu.zeros((1,), vector.dtype), gpu.compute)  # connects the workers
            gpu.compute.wait()

    def start(self, index: int) -> None:
        self._stream.wait_event(self._gpu.compute.record())
        lo, hi = self._buckets[index]
        self._comm.sum(self._vector[lo:hi], self._stream)

    def finish(self) -> None:
        self._gpu.compute.wait_event(self._stream.record())

    def free(self) -> None:
        with self._gpu.activate():
            self._stream.wait()
            self._comm.destroy()


def _unique_id() -> Any:
    """Return NCCL's unique identifier, or the reason why there is none."""
    try:
        return nccl.unique_id()
    except Exception as error:
        return f"NCCL failed: {error}"


def _problem(gpus: list[tuple[str, str]]) -> str:
    if not nccl.available:
        return "NCCL is not installed (pip install nvidia-nccl-cu13, or cu12)"
    return "" if len(set(gpus)) == len(gpus) else "workers share a GPU, but NCCL requires one GPU per worker"


@contextmanager
def _time_limit(hierarchy: Hierarchy) -> Iterator[None]:
    """End the run if workers cannot connect; NCCL itself would wait forever."""

    def end() -> None:
        line = f"NCCL did not connect within {_LIMIT_S:.0f} s; use --gpu-transport host, or debug with NCCL_DEBUG=INFO"
        print(f"mpitrain: {line}", file=sys.__stderr__, flush=True)
        hierarchy.comm.Abort(1)

    timer = threading.Timer(_LIMIT_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
