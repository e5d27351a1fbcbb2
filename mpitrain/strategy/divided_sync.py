"""``--mode sync`` without overlapping the phases of a step: scripts may use the gradient before the update.

The gradients of a node's ranks are rows of one shared array; parameters and optimizer slots are shared too. Each rank
sums its own ranges of the rows over the ranks and nodes, and updates these ranges of the parameters. ``sync`` overlaps
these phases with the backward pass; its docstring explains when a rank may write memory that other ranks read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from ..comm.background_sums import in_background
from ..comm.cluster import Cluster
from ..comm.hierarchy import hierarchy_of
from ..comm.internode import CompressedSums, DividedSums, NodeSums
from ..comm.powersgd import PowerSums
from ..comm.worker_statuses import WorkerStatuses
from ..core.device import Device
from ..core.extra_state import ExtraState
from ..core.kernels import sum_in_place, sum_rows
from ..core.layout import Array, row_stride
from ..core.ranges import Range
from ..core.training_state import TrainingState
from ..errors import JobError
from ..monitor.trace import span
from ..optim import Optimizer
from ..optim.whole_tensors import WholeTensorOptimizer
from ..plan.plan import Plan
from ..plan.progress import Progress
from .base import Part, SharedVectors, Stats, UpdatesOnRequest
from .bulk_synchronous import BulkSynchronous
from .node_codec import make_node_codec
from .tensor_updates import TensorUpdates, tensor_ranges

_WAIT, _AVERAGE = span("wait"), span("average")

# Flags of a worker's actions in a divided step.
_AVERAGES, _CHANGES, _UPDATES, _SKIPS = 4, 8, 16, 32
_KINDS = _AVERAGES | _CHANGES | _UPDATES | _SKIPS


class DividedSync(BulkSynchronous, UpdatesOnRequest):
    """Averages gradients and updates parameters on request; see ``base`` for the methods."""

    updates_whole_tensors = True

    def __init__(self, cluster: Cluster, plan: Plan, devices: Sequence[Device], state: TrainingState) -> None:
        super().__init__(cluster, plan)
        nbytes = (cluster.training.node.size + len(plan.vectors) + 1) * plan.nbytes
        self._hierarchy = hierarchy = hierarchy_of(cluster, nbytes, plan.config.parallel.shared_memory)
        self._barrier = hierarchy.barrier
        self._allocate(plan)
        self._updater = plan.updater(self._vectors, state.frozen)
        self._buckets = plan.buckets
        self._sums: NodeSums | None = None
        self._step_bytes = 0  # number of bytes that all workers send in a step
        self._owned_ranges: Sequence[Sequence[Range]] = [[hierarchy.owned_range(*bucket)] for bucket in self._buckets]
        self._codec = make_node_codec(plan, hierarchy, self._buckets)
        if hierarchy.n_nodes > 1:
            self._use(self._make_sums(compress=not plan.config.parallel.compress_after))
        self.tensors = self._make_tensors(state)
        self._partials = hierarchy.shared.allocate((hierarchy.node.size, self._updater.n_sums), np.float64)
        # The number of the last barrier phase. A step has one phase per bucket, one for partial sums and one for the
        # end; a divided step has as many as it needs.
        self._phase = 0
        self._begun = False  # whether the other workers can read this worker's status in this step
        self._statuses = WorkerStatuses(hierarchy)  # the share of the loss, and flags
        self._mean: Array | None = None  # the gradient of a divided step, shared by the node
        self._accepts = True  # whether ``--nan`` accepts all losses since the last update, in divided steps
        self._kind = 0  # kind of a status exchange in a divided step

    def _allocate(self, plan: Plan) -> None:
        node, shared, size = self._hierarchy.node, self._hierarchy.shared, plan.layout.size
        stride = row_stride(size)
        self._rows = shared.allocate((node.size, stride), plan.dtype)
        self._vectors = {name: shared.allocate((stride,), plan.dtype)[:size] for name in plan.vectors}
        self.initial_vectors = self._vectors if node.rank == 0 else None
        self.shared_vectors = SharedVectors(node, self._vectors)
        self.shares_params = node.size > 1
        self.params, self.grads = self._vectors["params"], self._rows[node.rank, :size]
        self.grads[:] = 0  # gaps between parameters must stay zero
        self._in_order = np.arange(node.size)

    def _make_sums(self, compress: bool) -> NodeSums:
        """Return the sums of gradients over nodes, with compression if the run requests it and ``compress`` is True."""
        return in_background(self._make_sums_of(compress), self._hierarchy, self.plan.nbytes)

    def _make_sums_of(self, compress: bool) -> NodeSums:
        compression, hierarchy = self.plan.config.compression, self._hierarchy
        if compression is None or not compress:
            return DividedSums(hierarchy, self._buckets, self.grads, self.params)
        if compression.rank:
            seed = self.plan.config.training.seed
            return PowerSums(hierarchy, self._buckets, self.plan.layout, self.grads, compression.rank, seed)
        assert self._codec is not None
        return CompressedSums(hierarchy, self._buckets, self.grads, self._codec)

    def start(self, progress: Progress, extra_state: ExtraState) -> None:
        super().start(progress, extra_state)
        if self.plan.config.parallel.compress_after and progress.step >= self.plan.config.parallel.compress_after:
            self._begin_to_compress()
        if self._sums is not None:
            self._sums.load_extra_state(extra_state)

    def extra_state(self) -> ExtraState:
        return {**super().extra_state(), **({} if self._sums is None else self._sums.extra_state())}

    def _compress_if_due(self) -> None:
        if self.progress.step == self.plan.config.parallel.compress_after:
            self._begin_to_compress()

    def _begin_to_compress(self) -> None:
        """Compress from now on. Collective over the workers, between two steps."""
        if self._sums is not None:
            for name in self.plan.vectors:
                self.vector(name)  # from now on all nodes update all parameters
            self._sums.free()
            self._use(self._make_sums(compress=True))

    def _use(self, sums: NodeSums) -> None:
        self._sums, self._owned_ranges = sums, sums.owned
        self._step_bytes = self._hierarchy.comm.allreduce(sums.bytes_sent)

    def _make_tensors(self, state: TrainingState) -> TensorUpdates | None:
        """Return the updates of this rank's tensors, if the optimizer needs whole tensors."""
        optimizer, layout, hierarchy = self.plan.optimizer, self.plan.layout, self._hierarchy
        if not isinstance(optimizer, WholeTensorOptimizer):
            return None
        is_replicated = self._sums is not None and self._sums.is_replicated
        n_owners = hierarchy.n_chunks if is_replicated else hierarchy.n_owners
        n_parts = n_owners if optimizer.can_divide() else 1  # otherwise the first owner updates all
        empty = layout.n_trained, layout.n_trained
        self._tensor_ranges = [*tensor_ranges(layout, n_parts), *[empty] * (n_owners - n_parts)]
        owner = hierarchy.node.rank if is_replicated else hierarchy.owner()
        own = (0, 0) if hierarchy.internode is None else self._tensor_ranges[owner]
        return TensorUpdates(optimizer, layout, state.frozen, own, hierarchy.comm)

    def _begin_step(self, number: float | None = None) -> None:
        """Publish this worker's status, before this worker publishes a bucket.

        Args:
            number: A number to publish in place of the loss.
        """
        self._begun = True
        self._await_params()
        self.await_release()  # in time: no rank of the node updates parameters before this rank posts its status
        loss, flags = float(self.loss if number is None else number), self.flags | self._kind
        self._statuses.post(loss, flags)

    def stats(self) -> Stats:
        sent, uncompressed = self._hierarchy.internode_bytes, self._hierarchy.uncompressed_bytes
        return super().stats()._replace(internode_bytes=sent, saved_bytes=max(0, uncompressed - sent))

    def _finish_sums(self) -> None:
        """Wait until the gradients of all owned ranges are summed over all nodes."""
        if self._sums is not None:
            for index in range(len(self._buckets)):
                self._sums.finish(index)
            self._sums.end_step()
            self._hierarchy.count_exchange(self.plan.nbytes, self._step_bytes)

    # A divided step.

    @span("average")
    def average(self) -> None:
        hierarchy = self._hierarchy
        if self._mean is None:
            self._mean = hierarchy.shared.allocate((row_stride(self.plan.layout.size),), self.plan.dtype)
        losses, _ = self._exchange_statuses(_AVERAGES)  # from now on, all gradients of the node are complete
        self._accepts &= self.non_finite.check(sum(losses.tolist()), losses, self.progress.step)
        if self._sums is not None:
            for index in range(len(self._buckets)):
                self._reduce(index)
            self._finish_sums()
        for lo, hi in chain.from_iterable(self._owned_ranges):
            if self._sums is not None:
                self._mean[lo:hi] = self.grads[lo:hi]
            elif lo < hi:
                sum_rows(self._rows, self._in_order, lo, hi, 1.0, self._mean[lo:hi])
        self._allgather(self._mean)
        self._node_barrier()
        self.grads[:] = self._mean[: len(self.grads)]
        if self.measures_norm:
            trained = self.grads[: self.plan.layout.n_trained].astype(np.float64)
            self.grad_norm = float(np.linalg.norm(trained)) if self._accepts else None

    def update(self, part: Part | None = None) -> None:
        # Until all workers are here, scripts may read the parameters.
        numbers, _ = self._exchange_statuses(_CHANGES, 0 if part is None else part.number)
        _check_same(numbers.tolist())
        if self._accepts:
            if self.tensors is not None:
                self._update_tensors(self.tensors, None if part is None else part.names)
            rows = self.grads[np.newaxis]
            if self._updater.needs_sums:
                self._phase += 1
                self._update_by_sums(rows, self._phase)
            else:
                for index in range(len(self._buckets)):
                    self._update(index, rows)
            self._allgather(self.params)
        self._node_barrier()

    @span("update")
    def _update_tensors(self, tensors: TensorUpdates, names: Collection[str] | None) -> None:
        """Update this rank's tensors with these names (None: all); wait for the ranks of the node."""
        tensors.update(self.grads, names)
        if self._sums is not None and not self._sums.is_replicated:
            with span("average"):
                self._hierarchy.allgather_ranges(self.params, self._tensor_ranges)
        self._node_barrier()

    def end_step(self, updated: bool, complete: bool) -> None:
        losses, flags = self._exchange_statuses(_UPDATES if updated else _SKIPS)
        loss = sum(losses.tolist())
        self._accepts &= self.non_finite.check(loss, losses, self.progress.step)
        accepted, self._begun = self._accepts, False
        self._accepts |= complete
        self.step_offset -= not updated
        self._node_barrier()  # all ranks of the node have read the statuses
        self.count(loss, accepted)
        self._compress_if_due()
        if complete or self.progress.step >= self.plan.train_steps:
            self.enter_consistent_point(flags)

    def _exchange_statuses(self, kind: int, number: float | None = None) -> tuple[Array, int]:
        """Return all workers' shares of the loss, or the numbers published instead, and the union of all flags.

        Waits until all workers call it.

        Raises:
            JobError: The workers do different things in this step; on all workers.
        """
        self._kind = kind
        self._begin_step(number)
        self._node_barrier()
        losses, flags = self._statuses.collect()
        self._kind = 0
        kinds = flags & _KINDS
        if kinds & (kinds - 1):
            raise JobError(
                "the workers do different things in a step: all workers must call step, use "
                "gradients and change parameters in the same steps",
                on_all_ranks=True,
            )
        return losses, flags & ~_KINDS

    def change_params(self, change: Callable[[], object]) -> None:
        numbers, _ = self._exchange_statuses(_CHANGES, -1)
        _check_same(numbers.tolist())
        if self._hierarchy.node.rank == 0:
            change()
        self._node_barrier()

    def set_optimizer(self, optimizer: Optimizer) -> None:
        self._updater.set_optimizer(optimizer)

    def set_slots(self, slots: Mapping[str, Array], updates: int) -> None:
        self.await_release()
        self._node_barrier()  # no rank of the node is saving the vectors
        for name, values in slots.items():
            for lo, hi in chain.from_iterable(self._owned_ranges):
                self._vectors[name][lo:hi] = values[lo:hi]
        self.step_offset = updates - self.progress.step
        self._node_barrier()

    def _node_barrier(self) -> None:
        """Wait until all ranks of the node call this method."""
        self._phase += 1
        self._barrier.publish(self._phase)
        self._wait(self._phase)

    def _await_params(self) -> None:
        """Wait until all parameters are complete. Here, they always are; in a subclass, they may arrive later."""

    def vector(self, name: str) -> Array:
        vector = self._vectors[name]
        self._await_params()
        with _WAIT:
            # Needed even if all nodes have updated the vector: their CPUs may round differently, and differences must
            # not grow.
            for bucket in self._buckets:
                self._hierarchy.allgather(vector, *bucket)
            self._hierarchy.node.Barrier()
        return vector

    def close(self) -> None:
        if self._sums is not None:
            self._sums.free()
        self._hierarchy.free()

    def _allgather(self, vector: Array) -> None:
        """Send the owned ranges of a node-shared vector to the nodes that do not have them."""
        if self._sums is not None and not self._sums.is_replicated:
            for bucket in self._buckets:
                self._hierarchy.allgather(vector, *bucket)

    @span("wait")
    def _wait(self, phase: int) -> None:
        self._barrier.wait(phase, None if self._sums is None else self._progress)

    def _progress(self) -> None:
        """Let MPI progress the pending operations between nodes."""
        self._statuses.progress()
        if self._sums is not None:
            self._sums.progress()

    @span("average")
    def _reduce(self, index: int) -> None:
        """Sum this rank's chunk of a bucket over the node, and start to reduce it between nodes."""
        assert self._sums is not None
        if len(self._rows) > 1:
            for lo, hi in self._sums.parts[index]:
                sum_in_place(self._rows, lo, hi, 1.0, self._hierarchy.node.rank)
        self._sums.start(index)

    @span("update")
    def _update(self, index: int, rows: Array) -> None:
        for lo, hi in self._owned_ranges[index]:
            if lo < hi:
                self._updater.update(lo, hi, rows, self.rule_step)

    @span("update")
    def _update_by_sums(self, rows: Array, phase: int) -> None:
        """Update in two passes; between them, all owners' sums of squares for norms are added up."""
        owned = [(lo, hi) for lo, hi in chain.from_iterable(self._owned_ranges) if lo < hi]
        partial: Any = 0.0
        for lo, hi in owned:
            partial = partial + self._updater.prepare(lo, hi, rows, self.grads, self.rule_step)
        sums = self._sum_partials(partial, phase)
        if self.measures_norm:
            self.grad_norm = math.sqrt(self._updater.squared_norm(sums))
        for lo, hi in owned:
            self._updater.finish(lo, hi, self.grads, sums, self.rule_step)

    @span("wait")
    def _sum_partials(self, partial: Any, phase: int) -> Array:
        """Return the sum of all owners' partial sums, in a fixed order."""
        hierarchy = self._hierarchy
        self._partials[hierarchy.node.rank] = partial
        self._barrier.publish(phase)
        self._barrier.wait(phase)
        total: Array = self._partials.sum(axis=0)
        if hierarchy.internode is None or self._sums is None or self._sums.is_replicated:
            return total
        by_node = np.empty((hierarchy.n_nodes, len(total)))
        hierarchy.internode.Allgather(total, by_node)
        summed: Array = by_node.sum(axis=0)
        return summed


def _check_same(parts: Sequence[float]) -> None:
    """Check that all workers change the same part of the parameters.

    Raises:
        JobError: The workers change different parts; on all workers.
    """
    if any(part != parts[0] for part in parts):
        raise JobError(
            "the workers change the parameters in different ways in a step: all workers must call step "
            "(for the same optimizers in the same order) or change_parameters",
            on_all_ranks=True,
        )
