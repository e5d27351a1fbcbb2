"""``--mode sync``: every step averages the gradients of all workers.

The gradients of a node's ranks are rows of one shared array; parameters and optimizer slots are shared too. A step has
four phases:

1. *backward*: each rank's backward pass writes its row. As layers complete, whole buckets (ranges of the vector, the
   last layers first) are declared ready.
2. *reduce-scatter*: once every rank of the node has declared a bucket, each rank sums its own part of it over the rows.
   With several nodes, the parts are then summed between nodes while earlier layers still compute.
3. *update*: each rank runs the optimizer on its owned ranges. No other rank of the node has the slots of these ranges.
On one
   node, reduction and update take one pass over memory.
4. *allgather*: updated parameters are sent to the other nodes while other buckets are updated, and the ranks of a node
   wait for each other. If the model can wait for the parameters of each layer (``late_params``), the parameters of the
   first layers are sent first. The others arrive while the next step computes.

With ``--compress``, the gradient travels in both directions between nodes, and all nodes update all parameters; see
``comm.internode``.

Every sum is taken in the order of the ranks within a node, then of the nodes. All ranks therefore have bit-identical
parameters, and two runs on the same ranks give bit-identical results. The update is partitioned as in ZeRO stage 1
(Rajbhandari et al. 2020, section 5.1), with shared memory instead of a broadcast within the node.

A worker's loss and flags, its *status*, are words of the barrier that the node's ranks read in place, without a copy.
No rank overwrites a status that another rank still reads: a barrier separates a step's reads from the next writes::

    rank a   status, buckets | backward | reads all statuses | update | publish last phase | wait | status of k + 1
    rank b   status, buckets ........ | backward | reads all statuses | update | publish .. | wait | status of k + 1

A rank writes its status once in a step, before it publishes its first bucket. A rank publishes with a release store and
waits with acquire loads. A rank that has seen a phase of all other ranks can therefore read their statuses. A rank
reads the statuses between the bucket phases and the last phase of the step. It publishes the last phase after its last
read. A rank writes its next status only after it has seen the last phase of all ranks, that is, after the last read of
every rank. A divided step has a barrier after each read (``DividedSync._exchange_statuses`` and its callers). If a loss
is not finite and training stops, all ranks raise the error after the same reads and write no more. A nonblocking
collective operation receives the statuses of other nodes in a buffer of this rank (``comm.worker_statuses``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ..comm.cluster import Cluster
from ..core.device import Device
from ..core.layout import Array
from ..core.training_state import TrainingState
from ..monitor.trace import span
from ..plan.plan import Plan
from .base import DefersParams
from .divided_sync import DividedSync
from .late_params import LateParams

_AVERAGE = span("average")


class Sync(DividedSync, DefersParams):
    """Synchronous data parallel training, overlapped with the backward pass; see ``base`` for the methods."""

    def __init__(self, cluster: Cluster, plan: Plan, devices: Sequence[Device], state: TrainingState) -> None:
        super().__init__(cluster, plan, devices, state)
        self._declared = self._handled = 0  # numbers of this step's buckets that are declared and processed
        self._late: LateParams | None = None  # set if parameters arrive while the next step computes

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

    def _reduce_rest(self) -> None:
        for index in range(self._handled, len(self._buckets)):
            self._wait(self._phase + index + 1)
            self._reduce(index)
        self._handled = len(self._buckets)

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
