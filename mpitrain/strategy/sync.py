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

If a script sees the gradients, which it may change before the update, or if the optimizer needs whole tensors, the
update begins after the backward pass. When the script of a rank first uses a gradient, the rank sums all rows to a
vector of its own, ``shown_grads``, and updates its ranges with that. Several nodes then exchange the averages, not the
parameters, and every node updates all parameters. No rank writes its row again before all ranks of the node have begun
their next batch, because their scripts may see the gradient until then.

With ``--compress``, the gradient travels in both directions between nodes, and all nodes update all parameters; see
``comm.internode``.

Every sum is taken in the order of the ranks within a node, then of the nodes. All ranks therefore have bit-identical
parameters, and two runs on the same ranks give bit-identical results. The update is partitioned as in ZeRO stage 1
(Rajbhandari et al. 2020, section 5.1), with shared memory instead of a broadcast within the node.

A worker's loss and flags, its *status*, are words of the barrier that the node's ranks read in place, without a copy.
No rank overwrites a status that another rank still reads::

    rank a   status, buckets | backward | reads all statuses | update | publish last phase | wait | status of k + 1
    rank b   status, buckets ........ | backward | reads all statuses | update | publish .. | wait | status of k + 1

A rank writes its status once in an average, before it publishes its first bucket. A rank publishes with a release store
and waits with acquire loads. A rank that has seen a phase of all other ranks can therefore read their statuses. A rank
reads the statuses between the bucket phases and a later phase, which it publishes after its last read. A rank writes
its next status only after it has seen that phase of all ranks, that is, after the last read of every rank. The same
phase lets a rank write its row again, and read the averages of the node. If a loss is not finite and training stops,
all ranks raise the error after the same reads and write no more. A nonblocking collective operation receives the
statuses of other nodes in a buffer of this rank (``comm.worker_statuses``).
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
from .base import Part, SharedVectors, Stats
from .bulk_synchronous import BulkSynchronous
from .late_params import LateParams
from .node_codec import make_node_codec
from .tensor_updates import TensorUpdates, tensor_ranges

_WAIT, _AVERAGE = span("wait"), span("average")
_FLAG_BITS = 8  # the other bits of a status's flags are a digest of the actions since the last average
_DIGESTS = 1 << 40
_CHANGE, _UPDATE = 1, 2  # actions: a change of parameters by the script; an update, plus the number of its part


class Sync(BulkSynchronous):
    """Synchronous data parallel training, overlapped with the backward pass; see ``base`` for the methods."""

    averages_grads = sums_grads = has_slots = updates_whole_tensors = compresses_grads = True

    def __init__(self, cluster: Cluster, plan: Plan, devices: Sequence[Device], state: TrainingState) -> None:
        super().__init__(cluster, plan)
        nbytes = (cluster.training.node.size + len(plan.vectors) + 1) * plan.nbytes
        self._hierarchy = hierarchy = hierarchy_of(cluster, nbytes, plan.config.parallel.shared_memory)
        self._barrier = hierarchy.barrier
        # Whether a gradient is applied while it is summed, so that no rank sees the average.
        self._is_fused = not (plan.shows_grads or isinstance(plan.optimizer, WholeTensorOptimizer))
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
        self._statuses = WorkerStatuses(hierarchy)  # the share of the loss, and flags
        # The number of the last barrier phase. An average has one phase per bucket; each other barrier has one.
        self._phase = 0
        self._begun = False  # whether the other workers can read this worker's status
        self._declared = self._handled = 0  # numbers of the buckets that are declared and processed
        self._late: LateParams | None = None  # set if parameters arrive while the next step computes
        self._accepts = True  # whether ``--nan`` accepts all losses since the last update
        self._has_averaged = False  # whether this step has averaged, and so exchanged ``_total`` and ``_all_flags``
        self._total, self._all_flags = 0.0, 0  # the sum of the losses, and the union of all workers' flags
        self._actions = 0  # digest of the actions since the last exchange of statuses

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
        self._mean = self.grads  # the average over several nodes, shared by the node's ranks
        if node.size > 1 and not self._is_fused:
            self.shown_grads = np.zeros(size, plan.dtype)
            if self._hierarchy.n_nodes > 1:
                self._mean = shared.allocate((stride,), plan.dtype)[:size]
        # The rows whose sum is the gradient that ``shown_grads`` does not have yet; None if it has the gradient.
        self._unseen: Array | None = None
        self._rows_are_read = False  # whether other ranks may read this rank's row, the same on all ranks

    def _make_sums(self, compress: bool) -> NodeSums:
        """Return the sums of gradients over nodes, with compression if the run requests it and ``compress`` is True."""
        return in_background(self._make_sums_of(compress), self._hierarchy, self.plan.nbytes)

    def _make_sums_of(self, compress: bool) -> NodeSums:
        compression, hierarchy = self.plan.config.compression, self._hierarchy
        if compression is None or not compress:
            return DividedSums(hierarchy, self._buckets, self.grads, self.params if self._is_fused else self._mean)
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

    def _begin_to_compress(self) -> None:
        """Compress from now on. Collective over the workers, between two steps."""
        if self._sums is not None:
            for name in self.plan.vectors:
                self.vector(name)  # from now on all nodes update all parameters
            self._sums.free()
            self._use(self._make_sums(compress=True))

    def _use(self, sums: NodeSums) -> None:
        self._sums, self._owned_ranges = sums, sums.owned if self._is_fused else sums.parts
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

    def stats(self) -> Stats:
        sent, uncompressed = self._hierarchy.internode_bytes, self._hierarchy.uncompressed_bytes
        return super().stats()._replace(internode_bytes=sent, saved_bytes=max(0, uncompressed - sent))

    # A step.

    def ready(self, start: int) -> None:
        if not self._begun:
            self._post_status()
        buckets = self._buckets
        while self._declared < len(buckets) and buckets[self._declared].lo >= start:
            self._declared += 1
            self._barrier.publish(self._phase + self._declared)
        if start > 0:  # otherwise ``average`` follows, which waits
            self._work_ahead()

    @span("average")
    def average(self) -> None:
        if self._sums is not None:
            for index in range(self._handled, len(self._buckets)):
                self._wait(self._phase + index + 1)
                self._reduce(index)
        self._phase += len(self._buckets)
        self._wait(self._phase)
        try:
            self._collect_statuses()
        except BaseException:
            self._finish_sums()  # no operation may stay pending
            raise
        if self.measures_norm:
            self.grad_norm = None
        if not self._is_fused:
            self._complete_averages()
            self._declared = self._handled = 0
        elif not self._accepts:
            self._finish_sums()

    def update(self, part: Part | None = None) -> None:
        if self._is_fused:
            if self._accepts:
                self._update_fused()
            self._declared = self._handled = 0
        else:
            # Until all ranks of the node are here, scripts may read the parameters.
            self._meet(_UPDATE + (0 if part is None else part.number))
            if self._accepts:
                self._update_with_averages(None if part is None else part.names)
        self._node_barrier()

    def end_step(self, updated: bool, complete: bool) -> None:
        if not self._has_averaged:
            self._wait(self._phase)  # until all have read the last statuses
            self._post_status()
            self._node_barrier()
            self._collect_statuses()
            self._publish()
        loss, accepted, flags = self._total, self._accepts, self._all_flags
        self._accepts |= complete
        self._has_averaged, self._all_flags = False, 0
        self.step_offset -= not updated
        self.count(loss, accepted)
        if self.progress.step == self.plan.config.parallel.compress_after:
            self._begin_to_compress()
        if complete or self.progress.step >= self.plan.train_steps:
            self.enter_consistent_point(flags)
        if self.has_ended:
            self._await_params()

    def fetch_grads(self) -> None:
        if self._unseen is not None and self.shown_grads is not None:
            self._wait(self._phase)  # until the node's ranks have written their parts
            sum_rows(self._unseen, np.arange(len(self._unseen)), 0, len(self.shown_grads), 1.0, self.shown_grads)
            self._unseen = None

    def begin_batch(self) -> None:
        self._unseen, self._rows_are_read = None, False
        self._publish()

    def begin_backward(self, kept: float | None, averages: bool) -> None:
        if self.shown_grads is None:
            super().begin_backward(kept, averages)
            return
        # Whether ranks wait must not depend on what the script of one of them has looked at.
        if kept is not None and (self._rows_are_read or self._unseen is None or kept != 1):
            self.fetch_grads()
        is_seen = self._unseen is None
        if self._rows_are_read:
            self._node_barrier()  # no rank of the node reads this rank's row any more
        else:
            self._wait(self._phase)
        if kept is not None and is_seen:
            n = self.plan.layout.n_trained
            np.multiply(self.shown_grads[:n], kept, out=self.grads[:n])
            self.grads[n:] = self.shown_grads[n:]  # state is weighted by each worker's share already
        self._unseen, self._rows_are_read = None if averages else self.grads[np.newaxis], averages

    def change_params(self, change: Callable[[], object]) -> None:
        self._meet(_CHANGE)
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

    def late_params(self) -> Callable[[int], None] | None:
        if self._sums is None or not self._is_fused:
            return None
        self._late = LateParams(self._hierarchy, self._buckets, self._progress)
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
        if self._sums is not None:
            self._sums.free()
        self._hierarchy.free()

    # Agreement.

    def _post_status(self) -> None:
        """Publish this worker's share of the loss, its flags, and the digest of its actions since the last time."""
        self._begun = True
        self._await_params()
        self.await_release()  # in time: no rank of the node updates parameters before this rank posts its status
        self._statuses.post(float(self.loss), self.flags | self._actions << _FLAG_BITS)

    def _collect_statuses(self) -> None:
        """Combine the statuses of all workers.

        Raises:
            JobError: The workers have done different things since the last exchange; on all workers.
            NonFiniteLoss: The loss is not finite and ``--nan`` is ``stop``; on all workers.
        """
        losses, all_flags = self._statuses.collect()
        self._total, self._begun, self._has_averaged, self._actions = sum(losses.tolist()), False, True, 0
        for flags in all_flags:
            self._all_flags |= flags & ((1 << _FLAG_BITS) - 1)
            if flags >> _FLAG_BITS != all_flags[0] >> _FLAG_BITS:
                raise _other_action(on_all_ranks=True)
        self._accepts &= self.non_finite.check(self._total, losses, self.progress.step)

    def _meet(self, action: int) -> None:
        """Wait until all ranks of the node begin the same action.

        Raises:
            JobError: Another rank of the node does something else.
        """
        self.await_release()
        self._actions = (self._actions * 31 + action) % _DIGESTS
        self._phase += 1
        self._barrier.announce(self._phase, action)
        self._wait(self._phase)
        if not self._barrier.agree(self._phase):
            raise _other_action(on_all_ranks=False)

    def _publish(self) -> None:
        """Announce that others may read what this rank has written, and overwrite what it has read."""
        self._phase += 1
        self._barrier.publish(self._phase)

    def _node_barrier(self) -> None:
        """Wait until all ranks of the node call this method."""
        self._phase += 1
        self._barrier.publish(self._phase)
        self._wait(self._phase)

    @span("wait")
    def _wait(self, phase: int) -> None:
        self._barrier.wait(phase, None if self._sums is None else self._progress)

    def _progress(self) -> None:
        """Let MPI progress the pending operations between nodes."""
        self._statuses.progress()
        if self._sums is not None:
            self._sums.progress()

    def _await_params(self) -> None:
        """Wait until all parameters are complete. Collective over the node."""
        if self._late is not None:
            self._late.wait_for_all()

    # Sums.

    def _work_ahead(self) -> None:
        """Process buckets that the whole node has declared, while backward computes earlier layers."""
        while self._handled < self._declared and self._barrier.reached(self._phase + self._handled + 1):
            if self._sums is not None:
                self._reduce(self._handled)
            elif (
                not self._is_fused
                or self._updater.needs_sums
                or self.measures_norm
                or not all(map(math.isfinite, self._barrier.losses.tolist()))
            ):
                return  # left to ``update``
            else:
                self._update(self._handled, self._rows)
            self._handled += 1
        self._progress()

    @span("average")
    def _reduce(self, index: int) -> None:
        """Sum this rank's part of a bucket over the node, and start to sum it between nodes."""
        assert self._sums is not None
        if len(self._rows) > 1:
            for lo, hi in self._sums.parts[index]:
                sum_in_place(self._rows, lo, hi, 1.0, self._hierarchy.node.rank)
        self._sums.start(index)

    def _complete_averages(self) -> None:
        """Complete the averages of this rank's parts; with several nodes, in ``_mean``."""
        self._unseen = self._rows
        if self._sums is not None:
            self._unseen = self._mean[np.newaxis]
            for index in range(len(self._buckets)):
                self._sums.finish(index)
                if self._mean is not self.grads:
                    for lo, hi in self._sums.owned[index]:
                        self._mean[lo:hi] = self.grads[lo:hi]
                self._sums.share(index)
            self._end_sums()
        self._publish()
        if self.measures_norm and self._accepts:
            self.fetch_grads()
            self.grad_norm = float(np.linalg.norm(self._shown[: self.plan.layout.n_trained].astype(np.float64)))

    @property
    def _shown(self) -> Array:
        return self.grads if self.shown_grads is None else self.shown_grads

    def _finish_sums(self) -> None:
        """Wait until the gradients of all owned ranges are summed over all nodes."""
        if self._sums is not None:
            for index in range(len(self._buckets)):
                self._sums.finish(index)
            self._sums.end_step()
            self._hierarchy.count_exchange(self.plan.nbytes, self._step_bytes)

    def _end_sums(self) -> None:
        """Wait for what the other nodes have shared."""
        assert self._sums is not None
        for index in range(len(self._buckets)):
            self._sums.complete(index)
        self._sums.end_step()
        self._hierarchy.count_exchange(self.plan.nbytes, self._step_bytes)

    # Updates.

    def _update_fused(self) -> None:
        """Update with the sums of rows, of those buckets that are not processed yet."""
        by_sums = self._updater.needs_sums or self.measures_norm
        if self._sums is None:
            if by_sums:
                self._update_by_sums(self._rows)
            else:
                for index in range(self._handled, len(self._buckets)):
                    self._update(index, self._rows)
            return
        rows = self.grads[np.newaxis]  # the sum over all ranks is in this rank's own row
        late = None if self._sums.is_replicated else self._late
        if by_sums:
            for index in range(len(self._buckets)):
                self._sums.finish(index)
            self._update_by_sums(rows)
        for index in range(len(self._buckets)):
            if not by_sums:
                with _AVERAGE:
                    self._sums.finish(index)
                self._update(index, rows)
            if late is None:
                self._sums.share(index)
        if late is not None:
            self._hierarchy.count_exchange(self.plan.nbytes, self._step_bytes)
            late.begin(self._sums)
            return
        with _AVERAGE:
            self._end_sums()

    def _update_with_averages(self, names: Collection[str] | None) -> None:
        """Update the parameters with these names (None: all) with the averages that this rank's script sees."""
        if self.tensors is not None:
            self.fetch_grads()
            self._update_tensors(self.tensors, names)
        rows = self._shown[np.newaxis] if self._unseen is None or self.shown_grads is None else self._unseen
        if self._updater.needs_sums:
            self._update_by_sums(rows)
        else:
            for index in range(len(self._buckets)):
                self._update(index, rows)

    @span("update")
    def _update_tensors(self, tensors: TensorUpdates, names: Collection[str] | None) -> None:
        """Update this rank's tensors with these names (None: all); wait for the ranks of the node."""
        tensors.update(self._shown, names)
        if self._sums is not None and not self._sums.is_replicated:
            with span("average"):
                self._hierarchy.allgather_ranges(self.params, self._tensor_ranges)
        self._node_barrier()

    @span("update")
    def _update(self, index: int, rows: Array) -> None:
        for lo, hi in self._owned_ranges[index]:
            if lo < hi:
                self._updater.update(lo, hi, rows, self.rule_step)

    @span("update")
    def _update_by_sums(self, rows: Array) -> None:
        """Update in two passes; between them, all owners' sums of squares for norms are added up."""
        owned = [(lo, hi) for lo, hi in chain.from_iterable(self._owned_ranges) if lo < hi]
        partial: Any = 0.0
        for lo, hi in owned:
            partial = partial + self._updater.prepare(lo, hi, rows, self.grads, self.rule_step)
        sums = self._sum_partials(partial)
        if self.measures_norm and self._is_fused:
            self.grad_norm = math.sqrt(self._updater.squared_norm(sums))
        for lo, hi in owned:
            self._updater.finish(lo, hi, self.grads, sums, self.rule_step)

    def _sum_partials(self, partial: Any) -> Array:
        """Return the sum of all owners' partial sums, in a fixed order."""
        hierarchy = self._hierarchy
        self._partials[hierarchy.node.rank] = partial
        self._node_barrier()
        total: Array = self._partials.sum(axis=0)
        if hierarchy.internode is None or self._sums is None or self._sums.is_replicated or not self._is_fused:
            return total
        by_node = np.empty((hierarchy.n_nodes, len(total)))
        hierarchy.internode.Allgather(total, by_node)
        summed: Array = by_node.sum(axis=0)
        return summed


def _other_action(on_all_ranks: bool) -> JobError:
    return JobError(
        "the workers do different things in a step: all workers must call backward, step (for the same optimizers in "
        "the same order) and change_parameters in the same steps",
        on_all_ranks=on_all_ranks,
    )
