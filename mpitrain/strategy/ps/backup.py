"""``--mode backup``: a step uses its first gradients to arrive; later ones are dropped.

Chen, Pan, Monga, Bengio and Jozefowicz, Revisiting distributed synchronous SGD, 2016, section 3. If all workers and
servers share one node, the workers whose gradients are used each sum and update one range of the parameters, in work
item order, without copies. All workers read the parameters in place: a gradient computed while they change is too late
and is dropped. Otherwise servers collect the gradients and update (``Collector``).
"""

from __future__ import annotations

import math

import numpy as np

from ...core.layout import Array
from ...core.ranges import aligned_range
from ..base import StepResult, Wrap
from .client import PsStrategy
from .coordinator import DROPPED
from .store import Store


class BackupWithServers(PsStrategy):
    """A worker of ``--mode backup`` with servers on several nodes."""

    def _memory(self) -> tuple[Array, Array]:
        params, grads = super()._memory()
        rows = self._store.rows
        if rows is not None:  # a server on this node sums the gradients in place
            grads = rows[self._store.nodes.comm.rank, : self._plan.layout.size]
            grads[:] = 0
        return params, grads

    def _least_version(self, step: int) -> int:
        return step

    def finish(self) -> None:
        loss = self._step_loss
        step, item = self._work.step, self._item
        if self._coordinator is not None:
            place = self._coordinator.admit(self._worker, item, step, loss, self._reads_since())
        else:
            assert self._remote_coordinator is not None
            place = self._remote_coordinator.admit(item, step, loss, self._reads_since())
        own = loss * self._plan.gradients_per_step  # an estimate from this worker's examples
        if place == DROPPED:
            self.result = StepResult(own, False)
            return
        self._push_to_shards(step, item, loss)
        self.result = StepResult(own, math.isfinite(loss) or self._nan == "ignore")

    def _push_to_shards(self, step: int, item: int, loss: float) -> None:
        """Send the gradient to all servers, and wait until they have applied the step."""
        for _, far in self._remote:
            far.post_collect(self.grads, item, step, loss)
        row = self._store.nodes.comm.rank
        for _, shard in self._local:
            shard.collect(row, item, step, loss)
        for _, far in self._remote:
            far.wait()
        for _, shard in self._local:
            self._store.waiting.until(lambda spins, shard=shard: shard.version > step)  # type: ignore[misc]
        self.step = step + 1

    def trace(self, wrap: Wrap) -> None:
        super().trace(wrap)
        wrap(self, "_push_to_shards", "wait")


class BackupOnOneNode(PsStrategy):
    """A worker of ``--mode backup`` if all ranks share one node."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._updater = self._plan.updater(store.vectors)
        local = [rank for rank in range(store.cluster.size) if store.nodes.same(rank, store.cluster.rank)]
        self._row_of = np.array([local.index(rank) for rank in store.cluster.worker_ranks])

    def _memory(self) -> tuple[Array, Array]:
        assert self._store.rows is not None
        grads = self._store.rows[self._store.nodes.comm.rank, : self._plan.layout.size]
        grads[:] = 0
        return self._store.vectors["params"], grads

    def _read(self, step: int) -> None:
        """Count a read; the parameters are read in place."""
        self._reads += 1

    def gather(self, name: str) -> Array:
        assert self._coordinator is not None
        with self._coordinator.frozen():
            return self._store.vectors[name].copy()

    def trace(self, wrap: Wrap) -> None:
        super().trace(wrap)
        wrap(self, "_update", "update")
        for method in ("wait_for_gradients", "wait_for_sums", "close_step"):
            wrap(self._coordinator, method, "wait")

    def finish(self) -> None:
        step, coordinator, waiting = self._work.step, self._coordinator, self._store.waiting
        assert coordinator is not None
        place = coordinator.admit(self._worker, self._item, step, self._step_loss, self._reads_since())
        if place == DROPPED:
            self.result = StepResult(self._step_loss * self._plan.gradients_per_step, False)
            return
        coordinator.wait_for_gradients(waiting)
        workers, loss = coordinator.admitted()
        updated = math.isfinite(loss) or self._nan == "ignore"
        if updated:
            self._update(place, self._row_of[workers], step)
        coordinator.close_step(step, loss, not updated, waiting)
        self.step = step + 1
        self.result = StepResult(loss, updated)

    def _update(self, place: int, order: Array, step: int) -> None:
        rows, updater = self._store.rows, self._updater
        assert rows is not None
        lo, hi = aligned_range(0, self._plan.layout.size, place, len(order))
        if not updater.needs_sums:
            updater.update(lo, hi, rows, step, order=order)
            return
        partials = self._store.partials
        assert partials is not None and self._coordinator is not None
        partials[place] = updater.prepare(lo, hi, rows, self.grads, step, order=order)
        self._coordinator.wait_for_sums(self._store.waiting)
        updater.finish(lo, hi, self.grads, partials[: len(order)].sum(axis=0), step)
