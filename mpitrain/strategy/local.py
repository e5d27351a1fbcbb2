"""``--mode local``: every worker trains alone for some steps, then all workers average.

After ``local_steps`` steps, parameters, optimizer slots and moving averages are replaced by their means over the
workers (Stich, Local SGD converges fast and communicates little, 2019; with momentum averaged too, Yu, Jin and Yang,
2019). With ``elastic_rho``, workers and a center move towards each other instead, and the center is the trained model
(Zhang, Choromanska and LeCun, Deep learning with elastic averaging SGD, 2015, equations 2 and 3, synchronous).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..checkpoint.snapshot import Snapshot
from ..comm.allreduce import MeanAllreduce
from ..comm.cluster import Cluster
from ..comm.hierarchy import hierarchy_of
from ..core.device import Device
from ..core.extra_state import ExtraState
from ..core.layout import Array
from ..core.training_state import TrainingState
from ..monitor.trace import span
from ..optim import Optimizer
from ..optim.whole_tensors import WholeTensorOptimizer
from ..plan.plan import Plan
from ..plan.progress import Progress
from .base import Part, StepResult, UpdatesOnRequest
from .bulk_synchronous import BulkSynchronous
from .tensor_updates import TensorUpdates

_WAIT = span("wait")

_LOSS, _COUNTED, _SKIPPED, _FLAGS = range(4)


class Local(BulkSynchronous, UpdatesOnRequest):
    """Local SGD and elastic averaging; see ``base.Strategy`` and ``base.UpdatesOnRequest`` for the methods.

    ``finish`` is collective over the workers in a step that averages, else local.
    """

    updates_whole_tensors = True

    def __init__(self, cluster: Cluster, plan: Plan, devices: Sequence[Device], state: TrainingState) -> None:
        super().__init__(cluster, plan)
        size, nbytes = plan.layout.size, (2 + cluster.training.node.size) * plan.nbytes
        self._hierarchy = hierarchy = hierarchy_of(cluster, nbytes, plan.config.parallel.shared_memory)
        self._every = plan.config.parallel.steps_per_average
        self._rho = plan.config.parallel.elastic_rho
        self._own: dict[str, Array] = {name: np.zeros(size, plan.dtype) for name in plan.vectors}
        self.params, self.grads = self._own["params"], np.zeros(size, plan.dtype)
        self.initial_vectors = self._own
        self._center = np.zeros_like(self.params) if self._rho is not None else None
        self._updater = plan.updater(self._own, state.frozen)
        if isinstance(plan.optimizer, WholeTensorOptimizer):
            self.tensors = TensorUpdates(plan.optimizer, plan.layout, state.frozen, (0, size))
        self._accepts = True  # whether all losses since the last update were finite
        self._mean = MeanAllreduce(hierarchy, size, plan.dtype)
        self._since = np.zeros(4)  # this worker's totals since the last average, exchanged at the next

    def start(self, progress: Progress, extra_state: ExtraState) -> None:
        super().start(progress, extra_state)
        if self._center is not None:
            self._center[:] = self.params

    def finish(self) -> None:
        self.average()
        self.update()
        self.end_step(updated=True, complete=True)

    def average(self) -> None:
        """Check the loss; workers apply their own gradients."""
        self._accepts &= self.non_finite.check_own(float(self.loss), self._hierarchy.comm.rank, self.progress.step)

    def update(self, part: Part | None = None) -> None:
        self.await_release()
        if self._accepts:
            self._update(part)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        self._updater.set_optimizer(optimizer)

    def set_slots(self, slots: Mapping[str, Array], updates: int) -> None:
        self.await_release()
        for name, values in slots.items():
            self._own[name][:] = values
        self.step_offset = updates - self.progress.step

    def end_step(self, updated: bool, complete: bool) -> None:
        if not updated:
            self.average()
            self.step_offset -= 1
        loss, accepted = float(self.loss), self._accepts
        self._accepts |= complete
        self.await_release()
        if accepted:
            self._since[_LOSS] += loss
        self._since[_COUNTED if accepted else _SKIPPED] += 1
        self.advance()
        self.last_result = StepResult(loss, accepted)
        if self.progress.step % self._every == 0 or self.progress.step == self.plan.train_steps:
            self._average()

    def vector(self, name: str) -> Array:
        if self._center is None:
            return self._own[name]
        if name == "params":
            return self._center
        vector = self._own[name].copy()
        with _WAIT:
            self._mean(vector)
        return vector

    def snapshot(self) -> Snapshot:
        if self._center is None:
            return super().snapshot()
        vectors = {name: self.vector(name) for name in self.plan.vectors} | {"params": self._center.copy()}
        return self.snapshot_of(vectors, private=True)

    def close(self) -> None:
        self._hierarchy.free()

    @span("update")
    def _update(self, part: Part | None) -> None:
        if self.tensors is not None:
            self.tensors.update(self.grads, None if part is None else part.names)
        self._updater.update_all(self.grads, self.rule_step)

    @span("average")
    def _average(self) -> None:
        if self._center is None:
            for vector in self._own.values():
                self._mean(vector)
            if self.tensors is not None:
                self.tensors.average(self._mean, self._hierarchy.comm, self.plan.dtype)
        else:
            self._average_elastically()
        self.enter_consistent_point(self._exchange_totals())
        if self.has_ended and self._center is not None:
            self.params[:] = self._center

    def _average_elastically(self) -> None:
        assert self._center is not None and self._rho is not None
        mean = self.params.copy()
        self._mean(mean)
        away: Any = self.params - self._center
        self.params -= self.params.dtype.type(self._rho) * away
        self._center += self.params.dtype.type(self._rho * self._hierarchy.comm.size) * (mean - self._center)

    def _exchange_totals(self) -> int:
        """Add all workers' totals since the last average; return the union of their flags. Collective over them."""
        comm = self._hierarchy.comm
        self._since[_FLAGS] = self.flags
        all_workers = np.empty((comm.size, len(self._since)))
        comm.Allgather(self._since, all_workers)
        loss, counted, skipped = all_workers[:, :_FLAGS].sum(axis=0).tolist()
        self.tally_totals(self.progress.step, loss, int(counted), int(skipped))
        self._since[:] = 0
        return int(np.bitwise_or.reduce(all_workers[:, _FLAGS].astype(np.int64)))
