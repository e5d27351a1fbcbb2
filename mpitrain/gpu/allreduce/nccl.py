"""Sums by NCCL, from GPU to GPU: each worker needs one of its own."""

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

_LIMIT_S = 120.0  # for workers to find each other, which takes seconds


class NcclTransport:
    """See ``GpuTransport``."""

    name = "nccl"

    def __init__(self, hierarchy: Hierarchy, gpu: Gpu, vector: Array, buckets: Sequence[Bucket]) -> None:
        comm = hierarchy.comm
        self._gpu, self._vector, self._buckets = gpu, vector, buckets
        taken = comm.allgather((os.uname().nodename, identify()[gpu.index]))
        agree(hierarchy, _problem(taken))
        name: Any = comm.bcast(_unique_id() if comm.rank == 0 else None)
        agree(hierarchy, name if isinstance(name, str) else "")
        problem = ""
        with gpu.activate(), _time_limit(hierarchy):
            self._stream = Stream()
            try:
                self._comm = nccl.Communicator(comm.size, name, comm.rank)
            except Exception as error:
                problem = f"NCCL says: {error}"
            agree(hierarchy, problem)
            self._comm.sum(gpu.zeros((1,), vector.dtype), gpu.compute)  # which connects them
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
    """What the workers find each other by; in words why there is none."""
    try:
        return nccl.unique_id()
    except Exception as error:
        return f"NCCL says: {error}"


def _problem(taken: list[tuple[str, str]]) -> str:
    if not nccl.available:
        return "NCCL is not installed (pip install nvidia-nccl-cu13, or cu12)"
    return "" if len(set(taken)) == len(taken) else "workers share a GPU, and NCCL wants one for each"


@contextmanager
def _time_limit(hierarchy: Hierarchy) -> Iterator[None]:
    """End the run where workers do not find each other: NCCL itself waits for ever."""

    def end() -> None:
        line = f"NCCL does not come up within {_LIMIT_S:.0f} s: give --gpu-transport host, or see NCCL_DEBUG=INFO"
        print(f"mpitrain: {line}", file=sys.__stderr__, flush=True)
        hierarchy.comm.Abort(1)

    timer = threading.Timer(_LIMIT_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
