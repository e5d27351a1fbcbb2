"""``--mode async`` and ``ssp``: every gradient is one step.

A worker takes a work item, reads the newest parameters, computes a gradient, and sends it to every server. The servers
apply the gradient. In ``ssp`` (Ho et al., More effective distributed ML via a stale synchronous parallel parameter
server, 2013, section 3) no worker runs more than ``--staleness`` steps ahead of the slowest worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...comm.cluster import Cluster
from ...comm.shared_memory import SharedArrays
from ...core.device import Device
from ...core.layout import Array
from ...core.ranges import Range
from ...core.training_state import TrainingState
from ...monitor.trace import span
from ...optim import Updater
from ...plan.plan import Plan
from ..base import StepResult
from .client import PsStrategy
from .counted_steps import CountedSteps
from .remote import RemoteCoordinator
from .shard import Push
from .store import ParameterStore
from .worker_momentum import WorkerMomentum

_WAIT = span("wait")


def make_strategy(cluster: Cluster, plan: Plan, devices: Sequence[Device], state: TrainingState) -> Async:
    """Return the strategy for ``async`` or ``ssp``. Collective over all ranks."""
    return Async(AsyncStore(cluster, plan, state), devices, state)


class AsyncStore(ParameterStore):
    def _allocate_coordinator(self, shared: SharedArrays) -> CountedSteps:
        config = self.plan.config
        max_lead = config.parallel.max_staleness if config.mode.bounds_staleness else None
        return CountedSteps(shared, self.plan.workers, max_lead)


class Async(PsStrategy):
    """Applies every gradient as one step, on arrival; in ``ssp``, workers also wait for the slowest worker.

    Parts of a gradient from a GPU are sent to their shards as soon as they are ready, while the GPU computes the other
    parts. This is not possible if the worker clips the gradient or applies momentum.

    Args:
        devices: The devices of this worker.
    """

    coordinator: CountedSteps | RemoteCoordinator

    def __init__(self, store: ParameterStore, devices: Sequence[Device], state: TrainingState) -> None:
        super().__init__(store, state)
        plan = store.plan
        self._measure: Updater | None = None
        if plan.optimizer.clip_norm is not None and not plan.optimizer.layerwise:
            slots = dict.fromkeys(plan.optimizer.slots, np.empty(0, plan.dtype))  # slots are not needed for norms
            self._measure = Updater(plan.optimizer, plan.layout, self.params, slots)
        self._momentum: WorkerMomentum | None = None
        if plan.worker_momentum is not None:
            remote = [part for shard in self._remote_shards for part in shard.ranges]
            self._momentum = WorkerMomentum(plan.worker_momentum, store.residual, remote, plan.layout, plan.dtype)
        # A script may change the gradient after the backward pass.
        self._early = devices[0].is_gpu and self._measure is None and self._momentum is None and not plan.shows_grads
        self._counts_lead = plan.config.mode.bounds_staleness
        # For each shard that has this gradient, the function that waits until it is applied.
        self._posted: dict[int, Callable[[], int]] = {}

    def unsent(self) -> dict[str, Array]:
        velocity = {} if self._momentum is None else {"velocity": self._momentum.velocity}
        return {**super().unsent(), **velocity}

    def ready(self, start: int) -> None:
        if self._early and start > 0 and self.non_finite.applies(self.take_loss()):
            self._post(start, 1.0)

    @span("push")
    def finish(self) -> None:
        loss = self.take_loss()
        updated = self.non_finite.applies(loss)
        staleness = self._push() if updated else 0
        if self._counts_lead:
            staleness = self.lead
        with _WAIT:
            done = self.coordinator.finish(self.worker, loss, staleness, self.take_reads(), not updated)
        self.advance_to(done)
        self.last_result = StepResult(loss, updated)

    def _push(self) -> int:
        """Have every shard apply the gradient; return its staleness at the first shard."""
        clip = self._clip()
        if self._momentum is not None:
            self._momentum.apply(self.grads, clip)
            clip = 1.0
        self._post(0, clip)
        staleness, *_ = [self._posted.pop(s)() for s in range(len(self.shards))]
        return staleness

    def _post(self, start: int, clip: float) -> None:
        """Send the gradient to the shards whose ranges start at ``start`` or later, unless they have it."""
        for s in self.shard_order:
            if s not in self._posted and (start == 0 or _complete_from(start, self.shards[s].ranges)):
                push = Push(self.versions[s], clip, self.plan.config.parallel.staleness_scaling)
                self._posted[s] = self.shards[s].apply(self.grads, push)

    def _clip(self) -> float:
        """Return the factor that limits the gradient's norm to ``clip_norm``; 1.0 if this worker does not clip."""
        measure = self._measure
        if measure is None:
            return 1.0
        rows = self.grads[np.newaxis]
        squares = sum(measure.prepare(b.lo, b.hi, rows, self.grads, 0) for b in self.plan.buckets)
        return self.plan.optimizer.clip_factor(float(np.asarray(squares)[0]))


def _complete_from(start: int, ranges: Sequence[Range]) -> bool:
    """Return whether all ranges, of which there may be none, lie at or after ``start``."""
    return all(lo >= start for lo, _ in ranges)
