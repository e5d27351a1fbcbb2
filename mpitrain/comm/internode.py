"""Sums of gradients over nodes, bucket by bucket, while other buckets are computed.

A rank sums its parts of a bucket over the ranks of its node, in its own row of the node's gradients. ``NodeSums`` then
adds the parts of all nodes. There are two ways to divide the work:

- *divided* (``DividedSums``): a reduce-scatter gives each node the sum of a range of the rank's part. The node updates
  the parameters in that range, and an allgather returns them, or the sums themselves, to the other nodes.
- *replicated* (``CompressedSums``): the sum itself is returned, because a gradient can be compressed with error
  feedback, and every node updates all parameters. In the first exchange a node sends to each other node, encoded, the
  range which that node sums. In the second exchange a node sends the encoded sum of its own range to all other nodes.
  The error of both encodings is added to the node's next gradient. One vector holds the error of both exchanges: a node
  encodes its own range only in the second exchange, and all other ranges only in the first. (Tang, Lian, Yu, Zhang and
  Liu, DoubleSqueeze, ICML 2019.)

Sums are taken in the order of the nodes, so that the result depends neither on the MPI library nor on timing. The
operations of a communicator must start in the same order on all ranks. Therefore the first exchanges of all buckets use
one communicator, and the second exchanges another; both start in the order of the buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from ..core.extra_state import ExtraState, Value, Versioned, values_of
from ..core.layout import Array
from ..core.ranges import Bucket, Range
from .backoff import Backoff
from .exchange import Exchange, add_rows, in_order
from .hierarchy import Hierarchy
from .mpi import MPI
from .sum_order import SumOrder
from .vector_codec import VectorCodec

NAMESPACE = "compression"  # namespace of the extra state


class NodeSums:
    """Sums gradients over the nodes. Construction and ``free`` are collective over the workers.

    A step makes these calls, in this order:

    - ``start`` for each bucket;
    - for each bucket, in their order, ``finish`` and, after the caller's update of the ranges ``owned``, ``share``;
    - ``complete`` for each bucket;
    - ``end_step``, even if nothing was shared.

    ``finish_all``, ``complete_all`` and ``drop`` make several of these calls.

    Methods that are not marked as local are collective over the ranks with the same index on all nodes. These ranks
    call the methods in the same order.

    Attributes:
        parts: The ranges of each bucket that this rank sums over the ranks of its node, before ``start``.
        owned: The ranges of each bucket that this rank updates.
        is_replicated: Whether every node updates all parameters.
        bytes_sent: Number of bytes that this rank sends to other nodes in a step.
    """

    parts: Sequence[Sequence[Range]]
    owned: Sequence[Sequence[Range]]
    is_replicated = True
    bytes_sent = 0

    def start(self, index: int) -> None:
        """Begin to sum a bucket."""

    def progress(self) -> None:
        """Let MPI move data. Local."""

    def is_summed(self, index: int) -> bool:
        """Let MPI move data; return whether ``finish`` would not wait, or True if that is not known. Local."""
        self.progress()
        return True

    def finish(self, index: int) -> None:
        """Wait until the gradients in ``owned[index]`` are the sums over all nodes."""

    def share(self, index: int) -> None:
        """Begin to return the parameters, or the sums, in ``owned[index]`` to the other nodes."""

    def is_complete(self, index: int) -> bool:
        """Let MPI move data; return whether ``complete`` would not wait. Local."""
        return True

    def complete(self, index: int) -> None:
        """Wait until this rank has received what the other nodes have shared of a bucket."""

    def end_step(self) -> None:
        """Prepare for the next step."""

    def finish_all(self) -> None:
        """Finish each bucket."""
        for index in range(len(self.owned)):
            self.finish(index)

    def complete_all(self) -> None:
        """Complete each bucket, and end the step."""
        for index in range(len(self.owned)):
            self.complete(index)
        self.end_step()

    def drop(self) -> None:
        """End a step whose sums are not used, after ``start`` for each bucket."""
        self.finish_all()
        self.end_step()

    def extra_state(self) -> ExtraState:
        """Return the error to be added to the next gradient, on the first worker. Collective over the workers."""
        return {}

    def load_extra_state(self, state: ExtraState) -> None:
        """Restore the error. Collective over the workers."""

    def free(self) -> None:
        """Free communicators."""


class OneNodeSums(NodeSums):
    """Takes the place of sums over nodes if there is one node: nothing is exchanged.

    The caller's update adds up the rows of the ranks, so that ``parts`` is empty.
    """

    def __init__(self, hierarchy: Hierarchy, buckets: Sequence[Bucket]) -> None:
        self.parts = [()] * len(buckets)
        self.owned = [[hierarchy.owned_range(*bucket)] for bucket in buckets]


class DividedSums(NodeSums):
    """Sums unchanged gradients, and returns parameters or sums.

    Args:
        rows: Shape (order.n_rows, layout.size): the node's gradients; sums are written to this rank's last row.
        order: How they are added.
        returned: Shape (layout.size,): the vector whose owned ranges ``share`` sends to the other nodes.
    """

    is_replicated = False

    def __init__(
        self, hierarchy: Hierarchy, buckets: Sequence[Bucket], rows: Array, order: SumOrder, returned: Array
    ) -> None:
        self._grads, self._returned = rows[order.own[-1]], returned
        self._vectors = [rows[row] for row, _ in order.sums]
        self.parts = [[hierarchy.chunk(*bucket)] for bucket in buckets]
        self.owned = [[hierarchy.owned_range(*bucket)] for bucket in buckets]
        self._exchanges: list[Exchange] = []
        self._gathers: dict[int, MPI.Request] = {}
        self._comm: MPI.Intracomm | None = None
        if hierarchy.internode is not None:
            self._comm, add = hierarchy.internode.Dup(), in_order(order.of_nodes)
            self._exchanges = [hierarchy.exchange(*bucket, rows.dtype, add, order.counts) for bucket in buckets]
            self.bytes_sent = sum(each.bytes_scattered + each.bytes_shared for each in self._exchanges)

    def start(self, index: int) -> None:
        if self._comm is not None:
            self._exchanges[index].start(*self._vectors)

    def progress(self) -> None:
        pending = [request for exchange in self._exchanges for request in exchange.requests]
        MPI.Request.Testall([*pending, *self._gathers.values()])

    def is_summed(self, index: int) -> bool:
        return self._comm is None or self._exchanges[index].has_arrived()

    def finish(self, index: int) -> None:
        if self._comm is not None:
            self._exchanges[index].finish(self._grads)

    def share(self, index: int) -> None:
        if self._comm is not None:
            self._gathers[index] = self._exchanges[index].share(self._returned, self._comm)

    def is_complete(self, index: int) -> bool:
        return index not in self._gathers or bool(self._gathers[index].Test())

    def complete(self, index: int) -> None:
        if index in self._gathers:
            self._gathers.pop(index).Wait()

    def free(self) -> None:
        if self._comm is not None:
            self._comm.Free()


class CompressedSums(NodeSums):
    """Sums gradients that a codec encodes; the sums are also returned in encoded form.

    Args:
        grads: Shape (layout.size,): this rank's row of the node's gradients.
        codec: Encodes ranges of ``grads``.
    """

    def __init__(self, hierarchy: Hierarchy, buckets: Sequence[Bucket], grads: Array, codec: VectorCodec) -> None:
        self.parts = self.owned = [[hierarchy.chunk(*bucket)] for bucket in buckets]
        self._hierarchy, self._residual = hierarchy, Residual(hierarchy, len(grads), grads.dtype)
        self._waiting = Backoff(oversubscribed=hierarchy.node.size > hierarchy.cores)
        self._buckets: list[_CompressedBucket] = []
        self._started = self._returned = 0  # number of buckets whose first and second exchange has begun in this step
        self._comm: MPI.Intracomm | None = None
        if hierarchy.internode is not None:
            self._comm = hierarchy.internode.Dup()
            self._buckets = [
                _CompressedBucket(hierarchy, self._comm, bucket, codec, grads, self._residual.own) for bucket in buckets
            ]
            self.bytes_sent = sum(bucket.bytes_sent for bucket in self._buckets)

    def start(self, index: int) -> None:
        if self._buckets:
            self._buckets[index].send_parts()
            self._started += 1

    def progress(self) -> None:
        while self._returned < self._started and self._buckets[self._returned].has_arrived():
            self._buckets[self._returned].return_sum()
            self._returned += 1
        if self._returned:
            self._buckets[self._returned - 1].has_arrived()  # lets MPI progress all pending transfers

    def is_summed(self, index: int) -> bool:
        self.progress()
        return not self._buckets or (self._returned > index and self._buckets[index].has_arrived())

    def finish(self, index: int) -> None:
        if self._buckets:
            self._waiting.until(lambda spins: self.is_summed(index))
            self._buckets[index].decode()

    def end_step(self) -> None:
        self._started = self._returned = 0

    def extra_state(self) -> ExtraState:
        return {NAMESPACE: Versioned(1, self._residual.of_nodes())}

    def load_extra_state(self, state: ExtraState) -> None:
        self._residual.load(values_of(state, NAMESPACE, 1))

    def free(self) -> None:
        if self._comm is not None:
            self._comm.Free()


class _CompressedBucket:
    """The exchange of this rank's part of a bucket, in which codes take the place of values.

    Args:
        comm: Communicator for the second half of the exchange.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        comm: MPI.Intracomm,
        bucket: Bucket,
        codec: VectorCodec,
        grads: Array,
        residual: Array,
    ) -> None:
        assert hierarchy.internode is not None
        self._second, self._grads, self._residual = comm, grads, residual
        self._node, owned = hierarchy.internode.rank, hierarchy.owned_ranges(*bucket)
        self._ranges, self._codecs = [slice(*part) for part in owned], [codec.of_range(*part) for part in owned]
        ends = [0, *accumulate(part.nbytes for part in self._codecs)]
        self._codes = np.zeros(ends[-1], np.uint8)
        self._encoded = [self._codes[start:stop] for start, stop in pairwise(ends)]
        self._exchange = Exchange(hierarchy.internode, [*pairwise(ends)], np.uint8, self._add)
        lo, hi = owned[self._node]
        self._rows = np.zeros((len(owned), hi - lo), grads.dtype)
        self._requests: list[MPI.Request] = []
        self.bytes_sent = self._exchange.bytes_scattered + self._exchange.bytes_shared

    def send_parts(self) -> None:
        """Begin the first exchange: send every other node the encoded range that the receiver sums."""
        for node, part in enumerate(self._ranges):
            if node != self._node:
                self._codecs[node].encode(self._grads[part], self._residual[part], self._encoded[node])
        self._exchange.start(self._codes)
        self._requests = self._exchange.requests

    def has_arrived(self) -> bool:
        """Return whether the last exchange has ended."""
        return bool(MPI.Request.Testall(self._requests))

    def return_sum(self) -> None:
        """Begin the second exchange: send the sum of this node's range to all others."""
        self._exchange.finish(self._codes)
        self._requests = [self._exchange.share(self._codes, self._second)]

    def _add(self, received: Array, out: Array) -> None:
        """Encode the sum of this node's gradient, which it has not sent, and of the gradients of the other nodes."""
        own, codec = self._ranges[self._node], self._codecs[self._node]
        for node, row in enumerate(self._rows):
            if node == self._node:
                row[:] = self._grads[own]
            else:
                codec.decode(received[node], row)
        add_rows(self._rows, self._grads[own])
        codec.encode(self._grads[own], self._residual[own], out)

    def decode(self) -> None:
        """Set the gradients, also in this node's own range, to the decoded sums, which are equal on all nodes."""
        for part, codec, encoded in zip(self._ranges, self._codecs, self._encoded, strict=True):
            codec.decode(encoded, self._grads[part])


class Residual:
    """The error that compression has made on a node, to be added to its next gradient.

    Construction and all methods are collective over the workers.

    Attributes:
        own: Shape (size,): the error of this node, shared by its ranks.
    """

    def __init__(self, hierarchy: Hierarchy, size: int, dtype: np.dtype[np.generic]) -> None:
        self._hierarchy = hierarchy
        self.own = hierarchy.shared.allocate((size,), dtype)
        self._set(lambda: 0)

    def of_nodes(self) -> dict[str, Array]:
        """Return the error of each node, on the first worker; empty on all others."""
        internode = self._hierarchy.internode
        if self._hierarchy.node.rank != 0 or internode is None:
            return {}
        rows = np.empty((internode.size if internode.rank == 0 else 0, len(self.own)), self.own.dtype)
        internode.Gather(self.own, rows)
        return {f"residual.{node}": row for node, row in enumerate(rows)}

    def load(self, values: Mapping[str, Value]) -> None:
        """Restore the errors; if the number of nodes has changed, the first node gets the sum of all errors."""
        rows = [np.asarray(values[f"residual.{node}"]) for node in range(len(values)) if f"residual.{node}" in values]
        leaders = self._hierarchy.internode
        index = leaders.rank if leaders is not None else 0
        if len(rows) == self._hierarchy.n_nodes:
            self._set(lambda: rows[index])
        elif rows:
            self._set(lambda: sum(rows) if index == 0 else 0)

    def _set(self, values: Callable[[], object]) -> None:
        if self._hierarchy.node.rank == 0:
            self.own[:] = values()
        self._hierarchy.node.Barrier()
