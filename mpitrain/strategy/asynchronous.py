"""``--mode async`` and ``ssp``: every gradient is a step of its own.

A worker takes a ticket, reads the newest parameters, computes, and has every server apply the gradient as it comes;
then it goes on. In ``ssp`` (Ho et al., More effective distributed ML via a stale synchronous parallel parameter server,
2013, section 3) no worker runs more than so many steps ahead of the slowest.
"""

from __future__ import annotations

import math

import numpy as np

from ..optim import Updater
from .base import StepResult
from .served import Served
from .shard import Push
from .store import Store


class Asynchronous(Served):
    """Every gradient is a step of its own, applied as it comes; in ``ssp`` nobody gets too far ahead."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        plan = self._plan
        self._measure: Updater | None = None
        if plan.optimizer.clip_norm is not None and not plan.optimizer.layerwise:
            slots = dict.fromkeys(plan.optimizer.slots, np.empty(0, plan.dtype))  # which measuring does not need
            self._measure = Updater(plan.optimizer, plan.layout, self.params, slots)

    def finish(self) -> None:
        loss = self._step_loss
        updated = math.isfinite(loss) or self._nan == "ignore"
        staleness = self._push() if updated else 0
        if self._plan.config.mode == "ssp":
            staleness = self._ahead
        if self._ledger is not None:
            self.step = self._ledger.finish(self._worker, loss, staleness, self._reads_since(), not updated)
        elif self._far is not None:
            self.step = self._far.finish(loss, staleness, self._reads_since(), not updated)
        self.result = StepResult(loss, updated)

    def _push(self) -> int:
        """Have every shard apply the gradient; returns its staleness at the first one."""
        clip, scaled = self._clip(), self._plan.config.staleness_scaling
        pushes = [Push(version, clip, scaled) for version in self._versions]
        for s, far in self._remote:
            far.post_apply(self.grads, pushes[s])
        staleness = {}
        # Workers begin at different shards, so that they do not queue for one after the other.
        begin = self._worker % max(1, len(self._local))
        for s, shard in self._local[begin:] + self._local[:begin]:
            staleness[s] = shard.apply(self.grads, pushes[s])
        for s, far in self._remote:
            staleness[s] = far.wait_apply()
        return staleness[0]

    def _clip(self) -> float:
        """What the gradient is multiplied by to keep to the optimizer's ``clip_norm``."""
        measure = self._measure
        if measure is None:
            return 1.0
        rows = self.grads[np.newaxis]
        squares = sum(measure.prepare(b.lo, b.hi, rows, self.grads, 0) for b in self._plan.buckets)
        return self._plan.optimizer.clip_factor(float(np.asarray(squares)[0]))
