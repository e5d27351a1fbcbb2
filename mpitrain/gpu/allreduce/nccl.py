"""Sums with NCCL between GPUs; each worker needs its own GPU.

NCCL adds in an order of its own. For virtual workers, whose sums are added by a tree, each worker receives its part of
all sums instead, adds them, and sends the result to all workers. With one sum for each worker, these are as many bytes.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ...comm.hierarchy import Hierarchy
from ...comm.sum_order import order_of_groups
from ...core.layout import Array
from ...core.ranges import Bucket, aligned_range
from .. import nccl, ops
from ..device import Gpu, identify
from ..stream import Stream
from .transport import agree

_Arrays = list[tuple[Array, int]]  # parts of vectors, and the worker to or from which each goes
_LIMIT_S = 120.0  # time limit for workers to connect, which normally takes seconds


class _Messages(NamedTuple):
    """What this worker sends and receives for the sum of a bucket, in the order in which it does so.

    Attributes:
        sent: All parts of its vectors.
        rows: Shape (number of vectors of all workers, length of its own part): memory for what it receives.
        received: The rows.
        own: Its own part of the sum.
        shared: Its own part, for each other worker.
        returned: The parts of the other workers.
    """

    sent: _Arrays
    rows: Array
    received: _Arrays
    own: Array
    shared: _Arrays
    returned: _Arrays


class NcclTransport:
    """``GpuTransport`` through NCCL."""

    name = "nccl"

    def __init__(
        self, hierarchy: Hierarchy, gpu: Gpu, vectors: Sequence[Array], buckets: Sequence[Bucket], leaves: int | None
    ) -> None:
        comm, vector = hierarchy.comm, vectors[-1]
        self._gpu, self._vectors, self._vector, self._buckets = gpu, vectors, vector, buckets
        self._messages: list[_Messages] = []  # of each bucket, if sums are added by a tree
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
            if leaves is None:
                self._comm.sum(gpu.zeros((1,), vector.dtype), gpu.compute)  # connects the workers
                gpu.compute.wait()
            else:
                self._messages = self._make_messages(comm.rank, comm.size, leaves)
                gpu.compute.wait()
                for messages in self._messages:  # also connects the workers
                    self._add_in_tree(messages)
                self._stream.wait()

    def start(self, index: int) -> None:
        self._stream.wait_event(self._gpu.compute.record())
        if self._messages:
            self._add_in_tree(self._messages[index])
        else:
            lo, hi = self._buckets[index]
            self._comm.sum(self._vector[lo:hi], self._stream)

    def finish(self) -> None:
        self._gpu.compute.wait_event(self._stream.record())

    def _make_messages(self, rank: int, workers: int, leaves: int) -> list[_Messages]:
        counts, order = order_of_groups([[worker] for worker in range(workers)], leaves)
        self._order = self._gpu.copy_of(order)
        each = range(workers)
        parts_of = [[slice(*aligned_range(lo, hi, worker, workers)) for worker in each] for lo, hi in self._buckets]
        width = max(self._vector[parts[rank]].size for parts in parts_of)
        memory = self._gpu.empty((sum(counts) * width,), self._vector.dtype)
        senders = [worker for worker, count in enumerate(counts) for _ in range(count)]
        others = [worker for worker in range(workers) if worker != rank]
        made = []
        for parts in parts_of:
            own = self._vector[parts[rank]]
            rows = memory[: sum(counts) * own.size].reshape(sum(counts), own.size)
            sent = [(vector[part], worker) for worker, part in enumerate(parts) for vector in self._vectors]
            returned = [(self._vector[parts[worker]], worker) for worker in others]
            received = [*zip(rows, senders, strict=True)]
            made.append(_Messages(sent, rows, received, own, [(own, worker) for worker in others], returned))
        return made

    def _add_in_tree(self, messages: _Messages) -> None:
        """Sum a bucket, of which each worker adds up one part."""
        sent, rows, received, own, shared, returned = messages
        self._comm.exchange(sent, received, self._stream)
        if own.size:
            with self._stream.raw:
                ops.sum_rows(rows, self._order, 0, own.size, 1.0, own)
        self._comm.exchange(shared, returned, self._stream)

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
