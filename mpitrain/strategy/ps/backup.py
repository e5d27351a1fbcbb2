"""``--mode backup``: a step uses the gradients that arrive first; later ones are dropped.

Chen, Pan, Monga, Bengio and Jozefowicz, Revisiting distributed synchronous SGD, 2016, section 3. If all workers and
servers share one node, each worker whose gradient is used has one range of the parameters. It sums the gradients of
this range in work item order, without copies, and updates the range. All workers read the parameters in place. A
gradient that is computed while the parameters change is too late and is dropped. Otherwise servers collect the
gradients and update (``BackupServer``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...comm.cluster import Cluster
from ...comm.shared_memory import SharedArrays
from ...core.device import Device
from ...core.layout import Array
from ...core.ranges import aligned_range
from ...core.training_state import TrainingState
from ...monitor.trace import span
from ...plan.plan import Plan
from ...plan.progress import Progress
from ..base import StepResult
from .client import PsStrategy
from .collected_steps import NO_PLACE, CollectedSteps, StepGradients
from .messages import Kind
from .remote import RemoteCoordinator
from .shard import LocalShard
from .store import ParameterStore

_WAIT = span("wait")


def make_strategy(cluster: Cluster, plan: Plan, devices: Sequence[Device], state: TrainingState) -> PsStrategy:
    """Return the strategy for ``backup``. Collective over all ranks."""
    return strategy_of(BackupStore(cluster, plan, state), state)


def strategy_of(store: BackupStore, state: TrainingState) -> PsStrategy:
    """Return the strategy for ``backup`` with this store. Local."""
    return BackupOnOneNode(store, state) if store.on_one_node else BackupWithServers(store, state)


class BackupStore(ParameterStore):
    """See ``ParameterStore``.

    Attributes:
        gradients: The gradients of this node's ranks; None if the node holds no shards.
    """

    shares_gradients = True

    def __init__(self, cluster: Cluster, plan: Plan, state: TrainingState) -> None:
        super().__init__(cluster, plan, state)
        self.gradients: StepGradients | None = None
        if self.memory.shards:
            n_sums = plan.updater(self.memory.vectors, self.memory.frozen).n_sums
            self.gradients = StepGradients(self._shared, plan.layout.size, plan.dtype, n_sums)

    @property
    def on_one_node(self) -> bool:
        """Whether all workers and shards share one node; workers then update by themselves."""
        ranks = [*self.cluster.worker_ranks, *self._holders]
        return all(self.nodes.same(rank, ranks[0]) for rank in ranks)

    def start(self, progress: Progress) -> None:
        if self.initial_vectors is not None and self.gradients is not None:
            self.gradients.open()
        super().start(progress)

    def _allocate_coordinator(self, shared: SharedArrays) -> CollectedSteps:
        return CollectedSteps(shared, self.plan.workers, self.plan.gradients_per_step, self.on_one_node)


class BackupWithServers(PsStrategy):
    """A worker of ``--mode backup`` if the workers and servers are on several nodes."""

    coordinator: CollectedSteps | RemoteCoordinator

    def __init__(self, store: BackupStore, state: TrainingState) -> None:
        self._shared_gradients = store.gradients  # gradients that a server on this node sums in place
        super().__init__(store, state)
        self._local_shards = [shard for shard in self.shards if isinstance(shard, LocalShard)]

    def allocate(self) -> tuple[Array, Array]:
        params, grads = super().allocate()
        if self._shared_gradients is not None:
            grads = self._shared_gradients.own
            grads[:] = 0
        return params, grads

    def least_version(self, step: int) -> int:
        return step

    @span("push")
    def finish(self) -> None:
        loss, step = self.take_loss(), self.work.step
        place = self.coordinator.admit(self.worker, self.item, step, loss, self.take_reads())
        own = loss * self.plan.gradients_per_step  # estimates the loss of the step from this worker's share
        if place != NO_PLACE:
            self._push(step, loss)
        self.last_result = StepResult(own, place != NO_PLACE and self.non_finite.applies(loss))

    @_WAIT
    def _push(self, step: int, loss: float) -> None:
        """Send the gradient to all servers, and wait until they have applied the step."""
        for remote in self._remote_shards:
            remote.server.post(Kind.COLLECT, self.item, step, loss, vector=self.grads)
        if self._shared_gradients is not None:
            self._shared_gradients.mark(self.item, step, loss)
        for remote in self._remote_shards:
            remote.server.wait(Kind.COLLECT)
        for local in self._local_shards:
            local.await_version(step + 1)
        self.advance_to(step + 1)


class BackupOnOneNode(PsStrategy):
    """A worker of ``--mode backup`` if all workers and servers share one node."""

    coordinator: CollectedSteps

    def __init__(self, store: BackupStore, state: TrainingState) -> None:
        assert store.gradients is not None
        self._shared_gradients = store.gradients
        super().__init__(store, state)
        cluster = store.cluster
        self._updater = store.plan.updater(store.memory.vectors, store.memory.frozen)
        local = [rank for rank in range(cluster.size) if store.nodes.same(rank, cluster.rank)]
        self._row_of = np.array([local.index(rank) for rank in cluster.worker_ranks])

    def allocate(self) -> tuple[Array, Array]:
        grads = self._shared_gradients.own
        grads[:] = 0
        return self.store.memory.vectors["params"], grads

    def read_params(self, step: int) -> None:
        """Count a read; the parameters are read in place."""
        self.n_reads += 1

    def vector(self, name: str) -> Array:
        return self.store.memory.vectors[name].copy()

    @span("push")
    def finish(self) -> None:
        loss, step, steps, waiting = self.take_loss(), self.work.step, self.coordinator, self.store.waiting
        place = steps.admit(self.worker, self.item, step, loss, self.take_reads())
        if place == NO_PLACE:
            self.last_result = StepResult(loss * self.plan.gradients_per_step, False)
            return
        with _WAIT:
            workers, loss = steps.wait_for_gradients(waiting)
        updated = self.non_finite.applies(loss)
        if updated:
            self._update(place, self._row_of[workers], step)
        with _WAIT:
            steps.close_step(step, loss, not updated, waiting)
        self.advance_to(step + 1)
        self.last_result = StepResult(loss, updated)

    @span("update")
    def _update(self, place: int, order: Array, step: int) -> None:
        rows, sums, updater = self._shared_gradients.rows, self._shared_gradients.sums, self._updater
        lo, hi = aligned_range(0, self.plan.layout.size, place, len(order))
        if not updater.needs_sums:
            updater.update(lo, hi, rows, step, order=order)
            return
        sums[place] = updater.prepare(lo, hi, rows, self.grads, step, order=order)
        with _WAIT:
            self.coordinator.wait_for_sums(self.store.waiting)
        updater.finish(lo, hi, self.grads, sums[: len(order)].sum(axis=0), step)
