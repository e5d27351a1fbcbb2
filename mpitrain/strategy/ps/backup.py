"""``--mode backup``: a step uses its first gradients to arrive; later ones are dropped.

Chen, Pan, Monga, Bengio and Jozefowicz, Revisiting distributed synchronous SGD, 2016, section 3. If all workers and
servers share one node, the workers whose gradients are used each sum and update one range of the parameters, in work
item order, without copies. All workers read the parameters in place: a gradient computed while they change is too late
and is dropped. Otherwise servers collect the gradients and update (``Collector``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...comm.cluster import Cluster
from ...core.device import Device
from ...core.layout import Array
from ...core.ranges import aligned_range
from ...core.training_state import TrainingState
from ...monitor.trace import span
from ...plan.plan import Plan
from ..base import StepResult
from .client import PsStrategy
from .coordinator import DROPPED
from .store import Store


def make_strategy(cluster: Cluster, plan: Plan, devices: Sequence[Device], state: TrainingState) -> PsStrategy:
    """Return the strategy for ``backup``. Collective over all ranks."""
    return strategy_of(Store(cluster, plan, state), state)


def strategy_of(store: Store, state: TrainingState) -> PsStrategy:
    """Return the strategy for ``backup`` with this store. Local."""
    return BackupOnOneNode(store, state) if store.on_one_node else BackupWithServers(store, state)


class BackupWithServers(PsStrategy):
    """A worker of ``--mode backup`` with servers on several nodes."""

    def allocate(self) -> tuple[Array, Array]:
        params, grads = super().allocate()
        rows = self.store.rows
        if rows is not None:  # a server on this node sums the gradients in place
            grads = rows[self.store.nodes.comm.rank, : self.plan.layout.size]
            grads[:] = 0
        return params, grads

    def least_version(self, step: int) -> int:
        return step

    @span("push")
    def finish(self) -> None:
        loss, step = self.take_loss(), self.work.step
        place = self.coordinator.admit(self.item, step, loss, self.take_reads())
        own = loss * self.plan.gradients_per_step  # an estimate from this worker's examples
        if place != DROPPED:
            self._push(step, loss)
        self.result = StepResult(own, place != DROPPED and self.non_finite.applies(loss))

    @span("wait")
    def _push(self, step: int, loss: float) -> None:
        """Send the gradient to all servers, and wait until they have applied the step."""
        for s in self.shard_order:
            self.shards[s].post_collect(self.grads, self.item, step, loss)
        for s in self.shard_order:
            self.shards[s].wait_collected(step)
        self.advance_to(step + 1)


class BackupOnOneNode(PsStrategy):
    """A worker of ``--mode backup`` if all ranks share one node."""

    def __init__(self, store: Store, state: TrainingState) -> None:
        super().__init__(store, state)
        cluster = store.cluster
        assert store.coordinator is not None and store.rows is not None and store.partials is not None
        self._shared, self._rows, self._partials = store.coordinator, store.rows, store.partials
        self._updater = store.plan.updater(store.vectors, store.frozen)
        local = [rank for rank in range(cluster.size) if store.nodes.same(rank, cluster.rank)]
        self._row_of = np.array([local.index(rank) for rank in cluster.worker_ranks])

    def allocate(self) -> tuple[Array, Array]:
        assert self.store.rows is not None
        grads = self.store.rows[self.store.nodes.comm.rank, : self.plan.layout.size]
        grads[:] = 0
        return self.store.vectors["params"], grads

    def read_params(self, step: int) -> None:
        """Count a read; the parameters are read in place."""
        self.n_reads += 1

    def vector(self, name: str) -> Array:
        return self.store.vectors[name].copy()

    @span("push")
    def finish(self) -> None:
        loss, step, shared, waiting = self.take_loss(), self.work.step, self._shared, self.store.waiting
        place = self.coordinator.admit(self.item, step, loss, self.take_reads())
        if place == DROPPED:
            self.result = StepResult(loss * self.plan.gradients_per_step, False)
            return
        with span("wait"):
            shared.wait_for_gradients(waiting)
        workers, loss = shared.admitted()
        updated = self.non_finite.applies(loss)
        if updated:
            self._update(place, self._row_of[workers], step)
        with span("wait"):
            shared.close_step(step, loss, not updated, waiting)
        self.advance_to(step + 1)
        self.result = StepResult(loss, updated)

    @span("update")
    def _update(self, place: int, order: Array, step: int) -> None:
        rows, updater = self._rows, self._updater
        lo, hi = aligned_range(0, self.plan.layout.size, place, len(order))
        if not updater.needs_sums:
            updater.update(lo, hi, rows, step, order=order)
            return
        self._partials[place] = updater.prepare(lo, hi, rows, self.grads, step, order=order)
        with span("wait"):
            self._shared.wait_for_sums(self.store.waiting)
        updater.finish(lo, hi, self.grads, self._partials[: len(order)].sum(axis=0), step)
