"""``--mode sync``: every step averages the gradients of all workers.

The gradients of a node's ranks are rows of one shared array; parameters and optimizer slots are shared too. A step has
four phases:

1. *backward*: each rank's backward pass writes its row. As layers complete, whole buckets (ranges of the vector, the
   last layers first) are declared ready.
2. *reduce-scatter*: once every rank of the node has declared a bucket, each rank sums its own part of it over the rows.
   With several nodes, the parts are then summed between nodes while earlier layers still compute.
3. *update*: each rank runs the optimizer on its owned ranges. No other rank of the node has the slots of these ranges.
   On one node, reduction and update take one pass over memory.
4. *allgather*: updated parameters are sent to the other nodes while other buckets are updated, and the ranks of a node
   wait for each other. If the model can wait for the parameters of each layer (``late_params``), the parameters of the
   first layers are sent first. The others arrive while the next step computes.

This update is *fused* with the sums: no rank sees the whole average. If a script sees the gradients, or if the
optimizer needs whole tensors, the average is completed before the update; see ``shown_gradient``.

With ``--compress``, the gradient travels in both directions between nodes, and all nodes update all parameters; see
``comm.internode``.

Every sum is taken in the order of the ranks within a node, then of the nodes. All ranks therefore have bit-identical
parameters, and two runs on the same ranks give bit-identical results. The update is partitioned as in ZeRO stage 1
(Rajbhandari et al. 2020, section 5.1), with shared memory instead of a broadcast within the node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np

from ..comm.background_sums import in_background
from ..comm.cluster import Cluster
from ..comm.hierarchy import hierarchy_of
from ..comm.internode import CompressedSums, DividedSums, NodeSums, OneNodeSums
from ..comm.powersgd import PowerSums
from ..comm.sum_order import sum_order
from ..core.device import Device
from ..core.extra_state import ExtraState
from ..core.kernels import sum_in_place
from ..core.layout import Array, row_stride
from ..core.ranges import Range
from ..core.training_state import TrainingState
from ..monitor.trace import span
from ..optim import Optimizer
from ..optim.whole_tensors import WholeTensorOptimizer
from ..plan.plan import Plan
from ..plan.progress import Progress
from .agreement import CHANGE, UPDATE, Agreement
from .base import Part, SharedVectors, Stats
from .bulk_synchronous import BulkSynchronous
from .late_params import LateParams
from .node_codec import make_node_codec
from .shown_gradient import ShownGradient
from .tensor_updates import DividedTensorUpdates

_WAIT, _AVERAGE = span("wait"), span("average")


class Sync(BulkSynchronous):
    """Synchronous data parallel training, overlapped with the backward pass; see ``base`` for the methods."""

    averages_grads = sums_grads = has_slots = updates_whole_tensors = compresses_grads = has_virtual_workers = True

    def __init__(self, cluster: Cluster, plan: Plan, devices: Sequence[Device], state: TrainingState) -> None:
        super().__init__(cluster, plan)
        virtual = plan.config.virtual_workers
        n_rows = cluster.training.node.allreduce(len(self._share.additions))
        nbytes = (n_rows + len(plan.vectors) + 1) * plan.nbytes
        self._hierarchy = hierarchy = hierarchy_of(cluster, nbytes, plan.config.parallel.shared_memory)
        node, shared, size = hierarchy.node, hierarchy.shared, plan.layout.size
        self._order = order = sum_order(hierarchy, virtual)
        self._rows = shared.allocate((order.n_rows, row_stride(size)), plan.dtype)
        self._vectors = {name: shared.allocate((row_stride(size),), plan.dtype)[:size] for name in plan.vectors}
        self.initial_vectors = self._vectors if node.rank == 0 else None
        self.shared_vectors, self.shares_params = SharedVectors(node, self._vectors), node.size > 1
        self.sums = [self._rows[row, :size] for row in order.own]
        self.grads = self.sums[-1]
        self.params, self.grads[:] = self._vectors["params"], 0  # gaps between parameters must stay zero
        self._agreement = Agreement(hierarchy, lambda: self._sums.progress())
        self._measures_whole = virtual is not None  # norms do not depend on the ranges of the ranks
        needs_whole = self._measures_whole and (plan.optimizer.needs_sums or plan.config.output.log_grad_norm)
        self._is_fused = not (plan.shows_grads or isinstance(plan.optimizer, WholeTensorOptimizer) or needs_whole)
        self._shown = ShownGradient(hierarchy, plan, self._agreement, self._rows, order, is_used=not self._is_fused)
        self.shown_grads = None if self._shown.values is self.grads else self._shown.values
        self._updater, self._buckets = plan.updater(self._vectors, state.frozen), plan.buckets
        self._partials = shared.allocate((node.size, self._updater.n_sums), np.float64)
        self._codec = make_node_codec(plan, hierarchy, self._buckets)
        self._compress_at = plan.config.parallel.compress_after  # 0 once it does
        self._use_sums(compress=not self._compress_at)
        if isinstance(plan.optimizer, WholeTensorOptimizer):
            divided = hierarchy, self.params, self._sums.is_replicated
            self.tensors = DividedTensorUpdates(plan.optimizer, plan.layout, state.frozen, *divided)
        self._late: LateParams | None = None  # set if parameters arrive while the next step computes
        self._accepts = True  # whether ``--nan`` accepts all losses since the last update
        # The loss of all workers and the union of their flags, once this step has exchanged them.
        self._exchanged: tuple[float, int] | None = None

    def _use_sums(self, compress: bool) -> None:
        """Sum gradients over nodes from now on, with compression if the run requests it and ``compress`` is True."""
        self._sums = in_background(self._make_sums(compress), self._hierarchy, self.plan.nbytes)
        self._step_bytes = self._hierarchy.comm.allreduce(self._sums.bytes_sent)  # sent by all workers in a step

    def _make_sums(self, compress: bool) -> NodeSums:
        compression, hierarchy = self.plan.config.compression, self._hierarchy
        if hierarchy.n_nodes == 1:
            return OneNodeSums(hierarchy, self._buckets)
        if compression is None or not compress:
            returned = self.params if self._is_fused else self._shown.mean
            return DividedSums(hierarchy, self._buckets, self._rows[:, : len(self.grads)], self._order, returned)
        if compression.rank:
            seed = self.plan.config.training.seed
            return PowerSums(hierarchy, self._buckets, self.plan.layout, self.grads, compression.rank, seed)
        assert self._codec is not None
        return CompressedSums(hierarchy, self._buckets, self.grads, self._codec)

    def start(self, progress: Progress, extra_state: ExtraState) -> None:
        super().start(progress, extra_state)
        if 0 < self._compress_at <= progress.step:
            self._begin_to_compress()
        self._sums.load_extra_state(extra_state)

    def extra_state(self) -> ExtraState:
        return {**super().extra_state(), **self._sums.extra_state()}

    def _begin_to_compress(self) -> None:
        """Compress from now on. Collective over the workers, between two steps."""
        for name in self.plan.vectors:
            self.vector(name)  # from now on all nodes update all parameters
        self._sums.free()
        self._compress_at = 0
        self._use_sums(compress=True)

    @property
    def waited_s(self) -> float:
        return self._hierarchy.barrier.waited_s

    def stats(self) -> Stats:
        sent, uncompressed = self._hierarchy.internode_bytes, self._hierarchy.uncompressed_bytes
        stats = super().stats()
        return stats._replace(internode_bytes=sent, saved_bytes=max(0, uncompressed - sent))

    # A step.

    def ready(self, start: int) -> None:
        if not self._agreement.has_posted:
            self._post_status()
            self._phase = self._hierarchy.barrier.phase  # one phase for each bucket follows
            self._declared = self._handled = 0  # numbers of the buckets that are declared and processed
        while self._declared < len(self._buckets) and self._buckets[self._declared].lo >= start:
            self._declared += 1
            self._agreement.publish()
        if start > 0:  # otherwise ``average`` follows, which waits
            self._work_ahead()

    @span("average")
    def average(self) -> None:
        if self._hierarchy.n_nodes > 1:
            for index in range(self._handled, len(self._buckets)):
                self._agreement.wait(self._phase + index + 1)
                self._reduce(index)
        self._agreement.wait()
        self._hierarchy.count_exchange(self.plan.nbytes, self._step_bytes)
        try:
            self._collect_statuses()
        except BaseException:
            self._sums.drop()  # no operation may stay pending
            raise
        if self.measures_norm:
            self.grad_norm = None
        if not self._is_fused:
            self._shown.complete(self._sums)
            if self.measures_norm and self._accepts:
                self.grad_norm = self._shown.norm()
        elif not self._accepts:
            self._sums.drop()

    def update(self, part: Part | None = None) -> None:
        if not self._is_fused:  # until all ranks of the node are here, scripts may read the parameters
            self._agreement.meet(UPDATE + (0 if part is None else part.number))
        if self._accepts and self._is_fused:
            self._update_fused()
        elif self._accepts:
            if self.tensors is not None:
                self._shown.fetch_grads()
                self.tensors.update(self._shown.values, None if part is None else part.names)
                self._agreement.node_barrier()
            if self._updater.needs_sums:
                self._update_by_sums(*self._shown.rows)
            else:
                for index in range(len(self._buckets)):
                    self._update_bucket(index, *self._shown.rows)
        self._agreement.node_barrier()

    def end_step(self, updated: bool, complete: bool) -> None:
        if self._exchanged is None:
            self._agreement.wait()  # until all have read the last statuses
            self._post_status()
            self._agreement.node_barrier()
            self._collect_statuses()
            self._agreement.publish()
        assert self._exchanged is not None
        (loss, flags), accepted = self._exchanged, self._accepts
        self._exchanged, self._accepts = None, accepted or complete
        self.step_offset -= not updated
        self.count(loss, accepted)
        if 0 < self._compress_at <= self.progress.step:
            self._begin_to_compress()
        if complete or self.progress.step >= self.plan.train_steps:
            self.enter_consistent_point(flags)
        if self.has_ended:
            self._await_params()

    def _post_status(self) -> None:
        """Tell the other workers this worker's share of the loss, and its flags."""
        self._await_params()
        self.await_release()  # in time: no rank of the node updates parameters before this rank posts its status
        self._agreement.post(float(self.loss), self.flags)

    def _collect_statuses(self) -> None:
        """Combine the statuses of all workers.

        Raises:
            JobError: The workers have done different things since the last exchange; on all workers.
            NonFiniteLoss: The loss is not finite and ``--nan`` is ``stop``; on all workers.
        """
        losses, flags = self._agreement.collect()
        loss = sum(losses.tolist())
        self._exchanged = loss, flags
        self._accepts &= self.non_finite.check(loss, losses, self.progress.step)

    def _await_params(self) -> None:
        """Wait until all parameters are complete. Collective over the node."""
        if self._late is not None:
            self._late.wait_for_all()

    # Sums.

    def _work_ahead(self) -> None:
        """Process buckets that the whole node has declared, while backward computes earlier layers."""
        barrier = self._hierarchy.barrier
        while self._handled < self._declared and barrier.reached(self._phase + self._handled + 1):
            if self._hierarchy.n_nodes > 1:
                self._reduce(self._handled)
            elif self._is_fused and not self._needs_norm and all(map(math.isfinite, barrier.losses.tolist())):
                self._update_bucket(self._handled, self._rows, self._order.order)
            else:
                return  # left to ``update``
            self._handled += 1
        self._agreement.progress()

    @span("average")
    def _reduce(self, index: int) -> None:
        """Sum this rank's part of a bucket over the node, and start to sum it between nodes."""
        for row, order in self._order.sums:
            if len(order) > 1:
                for lo, hi in self._sums.parts[index]:
                    sum_in_place(self._rows, order, lo, hi, 1.0, row)
        self._sums.start(index)

    @property
    def _needs_norm(self) -> bool:
        """Whether a fused update needs the norm of the whole gradient."""
        return self._updater.needs_sums or self.measures_norm

    def _update_fused(self) -> None:
        """Update each bucket that is not updated yet when its sum is complete, and return it to the other nodes."""
        sums, needs_norm, is_one_node = self._sums, self._needs_norm, self._hierarchy.n_nodes == 1
        # On one node, the update sums the rows; on several, this rank's own row has the sum over all ranks.
        rows = (self._rows, self._order.order) if is_one_node else (self.grads[np.newaxis], None)
        late = None if sums.is_replicated else self._late
        if needs_norm:
            sums.finish_all()
            norm = self._update_by_sums(*rows)
            if self.measures_norm:
                self.grad_norm = norm
        for index in range(self._handled if is_one_node else 0, len(self._buckets)):
            if not needs_norm:
                with _AVERAGE:
                    sums.finish(index)
                self._update_bucket(index, *rows)
            if late is None:
                sums.share(index)
        if late is not None:
            late.begin()
        else:
            with _AVERAGE:
                sums.complete_all()

    @property
    def _ranges(self) -> Sequence[Sequence[Range]]:
        """The ranges of each bucket that this rank updates."""
        return self._sums.owned if self._is_fused or self._sums.is_replicated else self._sums.parts

    @span("update")
    def _update_bucket(self, index: int, rows: Array, order: Array | None) -> None:
        """Update this rank's ranges of a bucket with the sum of ``rows`` in this order; None is that of the rows."""
        for lo, hi in self._ranges[index]:
            if lo < hi:
                self._updater.update(lo, hi, rows, self.rule_step, order=order)

    @span("update")
    def _update_by_sums(self, rows: Array, order: Array | None) -> float:
        """Update all ranges of this rank with sums over the gradients of all owners; return the gradient's norm."""
        ranges = [(lo, hi) for lo, hi in chain.from_iterable(self._ranges) if lo < hi]
        if not self._measures_whole:
            return math.sqrt(
                self._updater.update_by_sums(ranges, rows, self.grads, self.rule_step, self._sum_partials, order)
            )
        self._shown.fetch_grads()
        values, whole = self._shown.values, [(lo, hi) for lo, hi in self._buckets if lo < hi]
        return math.sqrt(
            self._updater.update_by_sums(
                ranges, values[np.newaxis], values, self.rule_step, self._await_node, measured=whole
            )
        )

    def _await_node(self, sums: Array) -> Array:
        """Return the sums when all ranks of the node have measured the parameters, which then may change."""
        self._agreement.node_barrier()
        return sums

    def _sum_partials(self, partial: Array) -> Array:
        """Return the sum of all owners' partial sums, in a fixed order."""
        hierarchy = self._hierarchy
        self._partials[hierarchy.node.rank] = partial
        self._agreement.node_barrier()
        total: Array = self._partials.sum(axis=0)
        if hierarchy.internode is None or self._sums.is_replicated or not self._is_fused:
            return total
        by_node = np.empty((hierarchy.n_nodes, len(total)))
        hierarchy.internode.Allgather(total, by_node)
        summed: Array = by_node.sum(axis=0)
        return summed

    # Scripts, hooks.

    def fetch_grads(self) -> None:
        self._shown.fetch_grads()

    def begin_batch(self) -> None:
        self._shown.begin_batch()

    def begin_backward(self, kept: float | None, averages: bool) -> None:
        if self.shown_grads is None:
            super().begin_backward(kept, averages)
        else:
            self._shown.begin_backward(kept, averages)

    def change_params(self, change: Callable[[], object]) -> None:
        self.await_release()
        self._agreement.meet(CHANGE)
        if self._hierarchy.node.rank == 0:
            change()
        self._agreement.node_barrier()

    def set_optimizer(self, optimizer: Optimizer) -> None:
        self._updater.set_optimizer(optimizer)

    def set_slots(self, slots: Mapping[str, Array], updates: int) -> None:
        self.await_release()
        self._agreement.node_barrier()  # no rank of the node is saving the vectors
        for name, values in slots.items():
            for lo, hi in chain.from_iterable(self._ranges):
                self._vectors[name][lo:hi] = values[lo:hi]
        self.step_offset = updates - self.progress.step
        self._agreement.node_barrier()

    def late_params(self) -> Callable[[int], None] | None:
        if self._hierarchy.n_nodes == 1 or not self._is_fused:
            return None
        self._late = LateParams(self._hierarchy, self._buckets, self._sums, self._agreement.progress)
        return self._late.wait

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
        self._sums.free()
        self._hierarchy.free()
