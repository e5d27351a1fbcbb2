"""``--mode sync``: every step averages the gradients of all workers.

The gradients of a node's ranks are rows of one shared array; parameters and optimizer slots are shared too. A step has
four phases:

1. *backward*: each rank's backward pass writes its row. As layers complete, whole buckets (ranges of the vector, the
   last layers first) are declared ready.
2. *reduce-scatter*: once every rank of the node has declared a bucket, each sums its own part of it over the rows.
   With several nodes, the parts are then summed between nodes while earlier layers still compute.
3. *update*: each rank runs the optimizer on its owned ranges, and alone on its node maintains their slots. On one node,
   reduction and update are one pass over memory.
4. *allgather*: updated parameters are sent to the other nodes while other buckets are updated, and the ranks of a node
   wait for each other. If the model can wait for the parameters of each layer (``late_params``), the first layers' are
   sent first, and the others arrive while the next step computes.

With ``--compress``, the gradient travels in both directions between nodes, and all nodes update all parameters; see
``comm.internode``.

Every sum is taken in the order of the ranks within a node, then of the nodes. All ranks therefore have identical bits,
and two runs on the same ranks give identical bits. The update is partitioned as in ZeRO stage 1 (Rajbhandari et al.
2020, section 5.1), with shared memory instead of a broadcast within the node.
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
from .base import DefersParams, Part, Stats, UpdatesOnRequest
from .bulk_synchronous import BulkSynchronous
from .late_params import LateParams
from .node_codec import make_node_codec
from .tensor_updates import TensorUpdates, tensor_ranges

_WAIT, _AVERAGE = span("wait"), span("average")

# Flags: what a worker does in a divided step.
_AVERAGES, _CHANGES, _UPDATES, _SKIPS = 4, 8, 16, 32
_KINDS = _AVERAGES | _CHANGES | _UPDATES | _SKIPS


class Sync(BulkSynchronous, UpdatesOnRequest, DefersParams):
    """Synchronous data parallel training; see ``base`` for the methods."""

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
        self._step_bytes = 0  # sent by all workers in a step
        self._owned_ranges: Sequence[Sequence[Range]] = [[hierarchy.owned_range(*bucket)] for bucket in self._buckets]
        self._codec = make_node_codec(plan, hierarchy, self._buckets)
        if hierarchy.n_nodes > 1:
            self._use(self._make_sums(compress=not plan.config.parallel.compress_after))
        self.tensors = self._make_tensors(state)
        self._partials = hierarchy.shared.allocate((hierarchy.node.size, self._updater.n_sums), np.float64)
        # Each step adds this many barrier phases: one per bucket, one for partial sums, one for the end. A divided step
        # adds as many as it needs.
        self._phase = 0
        self._begun = False  # whether the other workers can read this worker's status in this step
        self._declared = self._handled = 0  # number of buckets in this step
        self._statuses = WorkerStatuses(hierarchy)  # the share of the loss, and flags
        self._late: LateParams | None = None  # if parameters arrive while the next step computes
        self._mean: Array | None = None  # the gradient of a divided step, shared by the node
        self._accepts = True  # whether all losses since the last update were finite, in divided steps
        self._kind = 0  # of the exchange of statuses in a divided step

    def _allocate(self, plan: Plan) -> None:
        node, shared, size = self._hierarchy.node, self._hierarchy.shared, plan.layout.size
        stride = row_stride(size)
        self._rows = shared.allocate((node.size, stride), plan.dtype)
        self._vectors = {name: shared.allocate((stride,), plan.dtype)[:size] for name in plan.vectors}
        self.initial_vectors = self._vectors if node.rank == 0 else None
        self.shares_params = node.size > 1
        self.params, self.grads = self._vectors["params"], self._rows[node.rank, :size]
        self.grads[:] = 0  # gaps between parameters must stay zero
        self._in_order = np.arange(node.size)

    def _make_sums(self, compress: bool) -> NodeSums:
        """Return what sums gradients over nodes, compressed if the run requests it and ``compress`` is True."""
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
        n_parts = n_owners if optimizer.can_divide() else 1  # else the first owner updates all
        empty = layout.n_trained, layout.n_trained
        self._tensor_ranges = [*tensor_ranges(layout, n_parts), *[empty] * (n_owners - n_parts)]
        owner = hierarchy.node.rank if is_replicated else hierarchy.owner()
        own = (0, 0) if hierarchy.internode is None else self._tensor_ranges[owner]
        return TensorUpdates(optimizer, layout, state.frozen, own, hierarchy.comm)

    def ready(self, start: int) -> None:
        if self.tensors is not None:
            return  # ``finish`` needs the whole gradient
        if not self._begun:
            self._begin_step()
        buckets = self._buckets
        while self._declared < len(buckets) and buckets[self._declared].lo >= start:
            self._declared += 1
            self._barrier.publish(self._phase + self._declared)
        if start > 0:  # otherwise ``finish`` follows, which waits
            self._work_ahead()

    def _begin_step(self, number: float | None = None) -> None:
        """Set this worker's status where the other workers read it, before they see a bucket of this worker.

        Args:
            number: To be set in place of the loss.
        """
        self._begun = True
        self._await_params()
        self.await_release()  # no worker updates a bucket before it has this worker's gradient
        loss, flags = float(self.loss if number is None else number), self.flags | self._kind
        self._statuses.post(loss, flags)

    @span("average")
    def finish(self) -> None:
        if self.tensors is not None:
            self.average()
            self.update()
            self.end_step(updated=True, complete=True)
            return
        last = self._phase + len(self._buckets)
        if self._sums is not None:
            self._reduce_rest()
        self._wait(last)
        losses, flags = self._statuses.collect()
        loss = sum(losses.tolist())
        updated = self._accept(loss, losses)
        if self.measures_norm:
            self.grad_norm = None
        if updated:
            self._update_rest(last + 1)
        self._phase = last + 2
        self._begun, self._declared, self._handled = False, 0, 0
        self._barrier.publish(self._phase)
        self._wait(self._phase)
        self.count(loss, updated)
        self._compress_if_due()
        self.enter_consistent_point(flags)
        if self.has_ended:
            self._await_params()

    def _accept(self, loss: float, losses: Array) -> bool:
        """Return whether to update with this step's gradient; see ``BulkSynchronous.accept``."""
        updated = False
        try:
            updated = self.non_finite.check(loss, losses, self.progress.step)
        finally:
            if not updated:
                self._finish_sums()  # no operation may stay pending
        return updated

    def stats(self) -> Stats:
        sent, uncompressed = self._hierarchy.internode_bytes, self._hierarchy.uncompressed_bytes
        return super().stats()._replace(internode_bytes=sent, saved_bytes=max(0, uncompressed - sent))

    def _finish_sums(self) -> None:
        """Wait until the gradients of all owned ranges are the sums over all nodes."""
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
        losses, _ = self._exchange_statuses(_AVERAGES)  # then all gradients of the node are complete
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
        self._gather(self._mean)
        self._node_barrier()
        self.grads[:] = self._mean[: len(self.grads)]
        if self.measures_norm:
            trained = self.grads[: self.plan.layout.n_trained].astype(np.float64)
            self.grad_norm = float(np.linalg.norm(trained)) if self._accepts else None

    def update(self, part: Part | None = None) -> None:
        # Until all are here, scripts may read the parameters.
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
            self._gather(self.params)
        self._node_barrier()

    @span("update")
    def _update_tensors(self, tensors: TensorUpdates, names: Collection[str] | None) -> None:
        """Update those of this rank's tensors that have these names, or all; wait until the other ranks have, too."""
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
        self._node_barrier()  # all have read the statuses
        self.count(loss, accepted)
        self._compress_if_due()
        if complete or self.progress.step >= self.plan.train_steps:
            self.enter_consistent_point(flags)

    def _exchange_statuses(self, kind: int, number: float | None = None) -> tuple[Array, int]:
        """Return the workers' shares of the loss, or the numbers given in place of it, and their flags.

        It returns when all workers are here.

        Raises:
            JobError: On all workers: they do different things.
        """
        self._kind = kind
        self._begin_step(number)
        self._node_barrier()
        losses, flags = self._statuses.collect()
        self._kind = 0
        kinds = flags & _KINDS
        if kinds & (kinds - 1):
            error = JobError(
                "the workers do different things in a step: all must call step, or leave it out, and use gradients or "
                "change parameters, in the same steps"
            )
            error.on_all_ranks = True
            raise error
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
        """Wait until all ranks of the node are here."""
        self._phase += 1
        self._barrier.publish(self._phase)
        self._wait(self._phase)

    def vector(self, name: str) -> Array:
        vector = self._vectors[name]
        self._await_params()
        with _WAIT:
            # Also if all nodes have updated it: their processors may round differently, and the error must not grow.
            for bucket in self._buckets:
                self._hierarchy.allgather(vector, *bucket)
            self._hierarchy.node.Barrier()
        return vector

    def close(self) -> None:
        if self._sums is not None:
            self._sums.free()
        self._hierarchy.free()

    def _gather(self, vector: Array) -> None:
        """Send the owned ranges of a node-shared vector to the nodes that do not have them."""
        if self._sums is not None and not self._sums.is_replicated:
            for bucket in self._buckets:
                self._hierarchy.allgather(vector, *bucket)

    def _work_ahead(self) -> None:
        """Process buckets that the whole node has declared, while backward computes earlier layers."""
        while self._handled < self._declared and self._barrier.reached(self._phase + self._handled + 1):
            if self._sums is not None:
                self._reduce(self._handled)
            elif (
                self._updater.needs_sums
                or self.measures_norm
                or not all(map(math.isfinite, self._barrier.losses.tolist()))
            ):
                return  # left to ``finish``
            else:
                self._update(self._handled, self._rows)
            self._handled += 1
        self._progress()

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

    def _reduce_rest(self) -> None:
        for index in range(self._handled, len(self._buckets)):
            self._wait(self._phase + index + 1)
            self._reduce(index)
        self._handled = len(self._buckets)

    @span("update")
    def _update(self, index: int, rows: Array) -> None:
        for lo, hi in self._owned_ranges[index]:
            if lo < hi:
                self._updater.update(lo, hi, rows, self.rule_step)

    def _update_rest(self, sums_phase: int) -> None:
        needs_sums = self._updater.needs_sums or self.measures_norm
        if self._sums is None:
            if needs_sums:
                self._update_by_sums(self._rows, sums_phase)
            else:
                for index in range(self._handled, len(self._buckets)):
                    self._update(index, self._rows)
            return
        rows = self.grads[np.newaxis]  # the sum over all ranks is in this rank's own row
        late = None if self._sums.is_replicated else self._late
        if needs_sums:
            for index in range(len(self._buckets)):
                self._sums.finish(index)
            self._update_by_sums(rows, sums_phase)
        for index in range(len(self._buckets)):
            if not needs_sums:
                with _AVERAGE:
                    self._sums.finish(index)
                self._update(index, rows)
            if late is None:
                self._sums.share(index)
        self._hierarchy.count_exchange(self.plan.nbytes, self._step_bytes)
        if late is not None:
            late.begin(self._sums)
            return
        with _AVERAGE:
            for index in range(len(self._buckets)):
                self._sums.complete(index)
        self._sums.end_step()

    def late_params(self) -> Callable[[int], None] | None:
        if self._sums is None or self.tensors is not None:
            return None
        self._late = LateParams(self._hierarchy, self._buckets, self._progress)
        return self._late.wait

    def _await_params(self) -> None:
        """Wait until all parameters are complete. Collective over the node."""
        if self._late is not None:
            self._late.wait_for_all()

    @span("update")
    def _update_by_sums(self, rows: Array, phase: int) -> None:
        """Update in two passes; norms of whole vectors or parameters are summed between them."""
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
        JobError: They do not; on all workers.
    """
    if any(part != parts[0] for part in parts):
        error = JobError(
            "the workers change the parameters in different ways in a step: all must call step, for the same "
            "optimizers in the same order, or change_parameters"
        )
        error.on_all_ranks = True
        raise error
