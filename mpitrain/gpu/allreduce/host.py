"""Sums in host memory: gradients are copied to memory shared by a node's ranks, summed there, and copied back.

Vectors are split into chunks. Copies to the host, sums, copies to the GPU and the rest of the backward pass therefore
overlap. Between nodes the sums use MPI as in ``--mode sync`` without GPUs, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...comm.exchange import in_order
from ...comm.hierarchy import Hierarchy
from ...comm.phase_barrier import PhaseBarrier
from ...comm.shared_memory import SharedArrays
from ...comm.sum_order import sum_order
from ...core.kernels import sum_in_place, sum_rows
from ...core.layout import Array, row_stride
from ...core.ranges import Bucket, aligned_range
from ..device import Gpu
from ..stream import Stream

_CHUNK_BYTES = 4 << 20  # large enough for full copy bandwidth, small enough for three stages to overlap


class HostTransport:
    """``GpuTransport`` through host memory."""

    name = "host"

    def __init__(
        self, hierarchy: Hierarchy, gpu: Gpu, vectors: Sequence[Array], buckets: Sequence[Bucket], leaves: int | None
    ) -> None:
        node, dtype, vector = hierarchy.node, vectors[-1].dtype, vectors[-1]
        self._shared = shared = SharedArrays(node)  # separate, so that it can be freed if another transport is chosen
        self._hierarchy, self._gpu, self._vectors, self._vector = hierarchy, gpu, vectors, vector
        self._order = order = sum_order(hierarchy, leaves)
        self._chunks, self._last = _chunks(buckets, _CHUNK_BYTES // dtype.itemsize)
        stride = row_stride(len(vector))
        self._rows = shared.allocate((order.n_rows, stride), dtype)
        self._own = self._rows[order.own[0] : order.own[-1] + 1]
        self._sums = shared.allocate((stride,), dtype)
        self._down, self._summed = PhaseBarrier(shared, hierarchy.cores), PhaseBarrier(shared, hierarchy.cores)
        several = hierarchy.n_nodes > 1
        self._exchanges = [
            hierarchy.exchange(lo, hi, dtype, in_order(order.of_nodes), order.counts)
            for lo, hi in self._chunks
            if several and hierarchy.internode
        ]
        gpu.pin(self._own)
        gpu.pin(self._sums)
        with gpu.activate():
            self._to_host, self._to_device = Stream(), Stream()
        self._events: list[Any] = [None] * len(self._chunks)
        self._phase = 0
        # Numbers of this step's chunks that are enqueued, copied to the host, summed, and enqueued for the copy back.
        self._started = self._on_host = self._added = self._sent = 0

    def start(self, index: int) -> None:
        self._to_host.wait_event(self._gpu.compute.record())
        for chunk in range(self._started, self._last[index]):
            lo, hi = self._chunks[chunk]
            for vector, row in zip(self._vectors, self._own, strict=True):
                self._to_host.copy_to_host(vector[lo:hi], row[lo:hi])
            self._events[chunk] = self._to_host.record(self._events[chunk])
        self._started = self._last[index]
        self._work_ahead()

    def finish(self) -> None:
        if self._hierarchy.n_nodes > 1:
            self._finish_internode()
        else:
            self._finish_node()
        self._gpu.compute.wait_event(self._to_device.record())
        self._phase += len(self._chunks)
        self._started = self._on_host = self._added = self._sent = 0

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
            elif self._added < self._on_host:
                self._down.wait(self._phase + self._added + 1)
            elif self._on_host < len(self._chunks):
                self._events[self._on_host].synchronize()

    def _finish_internode(self) -> None:
        """Start all exchanges in the order of the chunks, then gather, so that collectives match on all nodes."""
        while self._added < len(self._chunks):
            self._work_ahead()
            if self._added < self._on_host:
                self._down.wait(self._phase + self._added + 1, self._progress)
            elif self._on_host < len(self._chunks):
                self._events[self._on_host].synchronize()
        hierarchy = self._hierarchy
        for chunk, (lo, hi) in enumerate(self._chunks):
            if self._exchanges:
                exchange = self._exchanges[chunk]
                exchange.finish(self._sums)
                hierarchy.allgather(self._sums, lo, hi)
            self._summed.publish(self._phase + chunk + 1)
            self._summed.wait(self._phase + chunk + 1, self._progress)
            self._to_device.copy_to_device(self._sums[lo:hi], self._vector[lo:hi])

    def _work_ahead(self) -> None:
        """Do all work that does not require waiting."""
        while self._on_host < self._started and self._events[self._on_host].done:
            self._on_host += 1
            self._down.publish(self._phase + self._on_host)
        while self._added < self._on_host and self._down.reached(self._phase + self._added + 1):
            self._add(self._added)
            self._added += 1
        if self._hierarchy.n_nodes > 1:
            self._progress()
            return
        while self._sent < self._added and self._summed.reached(self._phase + self._sent + 1):
            lo, hi = self._chunks[self._sent]
            self._to_device.copy_to_device(self._sums[lo:hi], self._vector[lo:hi])
            self._sent += 1

    def _add(self, chunk: int) -> None:
        """Sum this rank's part of a chunk over the node."""
        hierarchy = self._hierarchy
        lo, hi = self._chunks[chunk]
        if hierarchy.n_nodes == 1:
            lo, hi = aligned_range(lo, hi, hierarchy.node.rank, hierarchy.node.size)
            # The sums may be overwritten: all ranks have copied this chunk, and before it the last sums to the GPU.
            sum_rows(self._rows, self._order.order, lo, hi, 1.0, self._sums[lo:hi])
            self._summed.publish(self._phase + chunk + 1)
            return
        for row, order in self._order.sums:
            if len(order) > 1:
                sum_in_place(self._rows, order, *hierarchy.chunk(lo, hi), 1.0, row)
        if self._exchanges:
            self._exchanges[chunk].start(*(self._rows[row] for row, _ in self._order.sums))

    def _progress(self) -> None:
        """Let MPI make progress between nodes, also for exchanges that other ranks wait for."""
        for exchange in self._exchanges[: self._added]:
            exchange.has_arrived()
        self._hierarchy.comm.Iprobe()


def _chunks(buckets: Sequence[Bucket], most: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Split buckets into ranges of at most ``most`` elements; return the ranges, and how many end with each bucket."""
    chunks: list[tuple[int, int]] = []
    last: list[int] = []
    for lo, hi in buckets:
        parts = -(-(hi - lo) // most)
        chunks += filter(lambda ends: ends[0] < ends[1], (aligned_range(lo, hi, i, parts) for i in range(parts)))
        last.append(len(chunks))
    return chunks, last
