"""``--mode async`` and ``ssp``: every gradient is one step.

A worker takes a work item, reads the newest parameters, computes a gradient, has every server apply it, and continues.
In ``ssp`` (Ho et al., More effective distributed ML via a stale synchronous parallel parameter server, 2013, section 3)
no worker runs more than ``--staleness`` steps ahead of the slowest.
"""

from __future__ import annotations

import math

import numpy as np

from ...optim import Updater
from ..base import StepResult
from .client import PsStrategy
from .shard import Push, Ranges
from .store import Store


class Async(PsStrategy):
    """Applies every gradient as one step, on arrival; in ``ssp`` workers also wait for the slowest.

    Args:
        store: The parameters; freed with this object.
        early: Send a shard its part of the gradient as soon as that is ready: the gradient comes from a GPU, which
            continues to compute meanwhile.
    """

    def __init__(self, store: Store, early: bool = False) -> None:
        super().__init__(store)
        plan = self._plan
        self._measure: Updater | None = None
        if plan.optimizer.clip_norm is not None and not plan.optimizer.layerwise:
            slots = dict.fromkeys(plan.optimizer.slots, np.empty(0, plan.dtype))  # not needed for norms
            self._measure = Updater(plan.optimizer, plan.layout, self.params, slots)
        self._early = early and self._measure is None
        self._staleness: dict[int, int] = {}  # of this gradient, at the shards that have applied it
        self._posted: set[int] = set()  # remote shards that this gradient was sent to
        # Workers begin at different shards, so that they do not all wait for the same one.
        begin = self._worker % max(1, len(self._local))
        self._in_turn = self._local[begin:] + self._local[:begin]

    def begin(self, loss: float) -> None:
        super().begin(loss)
        self._staleness.clear()
        self._posted.clear()

    def ready(self, start: int) -> None:
        if self._early and start > 0 and self._is_applied:
            self._push_to_shards(start, 1.0)

    def finish(self) -> None:
        loss = self._step_loss
        updated = self._is_applied
        staleness = self._push() if updated else 0
        if self._plan.config.mode == "ssp":
            staleness = self._ahead
        if self._coordinator is not None:
            self.step = self._coordinator.finish(self._worker, loss, staleness, self._reads_since(), not updated)
        elif self._remote_coordinator is not None:
            self.step = self._remote_coordinator.finish(loss, staleness, self._reads_since(), not updated)
        self.result = StepResult(loss, updated)

    @property
    def _is_applied(self) -> bool:
        """Whether this gradient is applied."""
        return math.isfinite(self._step_loss) or self._nan == "ignore"

    def _push(self) -> int:
        """Have every shard apply the gradient; return its staleness at the first shard."""
        self._push_to_shards(0, self._clip())
        for s, far in self._remote:
            self._staleness[s] = far.wait_apply()
        return self._staleness[0]

    def _push_to_shards(self, start: int, clip: float) -> None:
        """Send the gradient to the shards whose ranges start at ``start`` or later, unless they have it."""
        scaled = self._plan.config.staleness_scaling
        for s, far in self._remote:
            if s not in self._posted and _complete_from(start, self._store.ranges[s]):
                far.post_apply(self.grads, Push(self._versions[s], clip, scaled))
                self._posted.add(s)
        for s, shard in self._in_turn:
            if s not in self._staleness and _complete_from(start, shard.ranges):
                self._staleness[s] = shard.apply(self.grads, Push(self._versions[s], clip, scaled))

    def _clip(self) -> float:
        """Return the factor that limits the gradient's norm to the optimizer's ``clip_norm``."""
        measure = self._measure
        if measure is None:
            return 1.0
        rows = self.grads[np.newaxis]
        squares = sum(measure.prepare(b.lo, b.hi, rows, self.grads, 0) for b in self._plan.buckets)
        return self._plan.optimizer.clip_factor(float(np.asarray(squares)[0]))


def _complete_from(start: int, ranges: Ranges) -> bool:
    """Return whether all ranges, of which there may be none, lie at or after ``start``."""
    return all(lo >= start for lo, _ in ranges)
