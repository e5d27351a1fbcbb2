"""Sums by the hosts: gradients come down to memory that the ranks of a node share, are summed there, and go up again.

Chunk by chunk, so that the copies down, the sums and the copies up go on at the same time, and beside the rest of the
backward pass. Between nodes the sums travel as in ``--mode sync`` without GPUs, and in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...comm.hierarchy import Hierarchy, ReduceScatter
from ...comm.phase_barrier import PhaseBarrier
from ...comm.shared_memory import SharedArrays, row_stride
from ...core.kernels import sum_in_place, sum_rows
from ...core.layout import Array
from ...core.ranges import Bucket, aligned_part
from ..device import Gpu
from ..stream import Stream

_CHUNK_BYTES = 4 << 20  # long enough for a copy to reach its rate, short enough for three to overlap


class HostTransport:
    """See ``GpuTransport``."""

    name = "host"

    def __init__(self, hierarchy: Hierarchy, gpu: Gpu, vector: Array, buckets: Sequence[Bucket]) -> None:
        node, dtype = hierarchy.node, vector.dtype
        self._shared = shared = SharedArrays(node)  # of its own, to be given back where another way is chosen
        self._hierarchy, self._gpu, self._vector = hierarchy, gpu, vector
        self._chunks, self._last = _chunks(buckets, _CHUNK_BYTES // dtype.itemsize)
        stride = row_stride(len(vector))
        self._rows = shared.allocate((node.size, stride), dtype)
        self._own = self._rows[node.rank]
        self._sums = shared.allocate((stride,), dtype)
        self._in_order = np.arange(node.size)
        self._down, self._summed = PhaseBarrier(shared, hierarchy.cores), PhaseBarrier(shared, hierarchy.cores)
        several = hierarchy.n_nodes > 1
        self._reduce_scatters = [
            ReduceScatter(hierarchy, lo, hi, dtype) for lo, hi in self._chunks if several and hierarchy.internode
        ]
        gpu.pin(self._own)
        gpu.pin(self._sums)
        with gpu.activate():
            self._leaving, self._coming = Stream(), Stream()
        self._events: list[Any] = [None] * len(self._chunks)
        self._phase = 0
        # Of this step's chunks, those that the GPU was asked for, that have come down, are summed, and go up.
        self._asked = self._left = self._added = self._sent = 0

    def start(self, index: int) -> None:
        self._leaving.wait_event(self._gpu.compute.record())
        for chunk in range(self._asked, self._last[index]):
            lo, hi = self._chunks[chunk]
            self._leaving.copy_to_host(self._vector[lo:hi], self._own[lo:hi])
            self._events[chunk] = self._leaving.record(self._events[chunk])
        self._asked = self._last[index]
        self._work_ahead()

    def finish(self) -> None:
        if self._hierarchy.n_nodes > 1:
            self._finish_travels()
        else:
            self._finish_node()
        self._gpu.compute.wait_event(self._coming.record())
        self._phase += len(self._chunks)
        self._asked = self._left = self._added = self._sent = 0

    def free(self) -> None:
        with self._gpu.activate():
            self._gpu.compute.wait()
        self._gpu.unpin(self._own)
        self._gpu.unpin(self._sums)
        self._shared.free()

    def _finish_node(self) -> None:
        while self._sent < len(self._chunks):
            self._work_ahead()
            if self._sent < self._added:
                self._summed.wait(self._phase + self._sent + 1)
            elif self._added < self._left:
                self._down.wait(self._phase + self._added + 1)
            elif self._left < len(self._chunks):
                self._events[self._left].synchronize()

    def _finish_travels(self) -> None:
        """Every node starts its exchanges in the order of the chunks, and only then gathers: collectives match."""
        while self._added < len(self._chunks):
            self._work_ahead()
            if self._added < self._left:
                self._down.wait(self._phase + self._added + 1, self._progress)
            elif self._left < len(self._chunks):
                self._events[self._left].synchronize()
        hierarchy = self._hierarchy
        for chunk, (lo, hi) in enumerate(self._chunks):
            if self._reduce_scatters:
                exchange = self._reduce_scatters[chunk]
                exchange.finish(self._own)
                self._sums[exchange.lo : exchange.hi] = self._own[exchange.lo : exchange.hi]
                hierarchy.allgather(self._sums, lo, hi)
            self._summed.publish(self._phase + chunk + 1)
            self._summed.wait(self._phase + chunk + 1, self._progress)
            self._coming.copy_to_device(self._sums[lo:hi], self._vector[lo:hi])

    def _work_ahead(self) -> None:
        """All that can be done without waiting."""
        while self._left < self._asked and self._events[self._left].done:
            self._left += 1
            self._down.publish(self._phase + self._left)
        while self._added < self._left and self._down.reached(self._phase + self._added + 1):
            self._add(self._added)
            self._added += 1
        if self._hierarchy.n_nodes > 1:
            self._progress()
            return
        while self._sent < self._added and self._summed.reached(self._phase + self._sent + 1):
            lo, hi = self._chunks[self._sent]
            self._coming.copy_to_device(self._sums[lo:hi], self._vector[lo:hi])
            self._sent += 1

    def _add(self, chunk: int) -> None:
        """Sum this rank's part of a chunk over the node."""
        hierarchy = self._hierarchy
        lo, hi = self._chunks[chunk]
        if hierarchy.n_nodes == 1:
            lo, hi = aligned_part(lo, hi, hierarchy.node.rank, hierarchy.node.size)
            # Before that the sums of the last step have been copied everywhere: else not all had come down here again.
            sum_rows(self._rows, self._in_order, lo, hi, 1.0, self._sums[lo:hi])
            self._summed.publish(self._phase + chunk + 1)
            return
        if hierarchy.node.size > 1:
            sum_in_place(self._rows, *hierarchy.chunk(lo, hi), 1.0, hierarchy.node.rank)
        if self._reduce_scatters:
            self._reduce_scatters[chunk].start(self._own)

    def _progress(self) -> None:
        """Let MPI move what is under way between nodes, also what another rank waits for."""
        for exchange in self._reduce_scatters[: self._added]:
            exchange.progress()
        self._hierarchy.comm.Iprobe()


def _chunks(buckets: Sequence[Bucket], most: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Ranges of at most ``most`` elements, in the order of the buckets; and how many there are up to each bucket."""
    chunks: list[tuple[int, int]] = []
    last: list[int] = []
    for lo, hi in buckets:
        parts = -(-(hi - lo) // most)
        chunks += filter(lambda ends: ends[0] < ends[1], (aligned_part(lo, hi, i, parts) for i in range(parts)))
        last.append(len(chunks))
    return chunks, last
