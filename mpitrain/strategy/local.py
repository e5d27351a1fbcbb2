"""``--mode local``: every worker trains alone for some steps, then all workers average.

After ``local_steps`` steps, parameters, optimizer slots and moving averages are replaced by their means over the
workers (Stich, Local SGD converges fast and communicates little, 2019; with momentum averaged too, Yu, Jin and Yang,
2019). With ``elastic_rho``, workers and a center move towards each other instead, and the center is the trained model
(Zhang, Choromanska and LeCun, Deep learning with elastic averaging SGD, 2015, equations 2 and 3, synchronous).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..comm.allreduce import MeanAllreduce
from ..comm.hierarchy import Hierarchy
from ..core.layout import Array
from ..plan.plan import Plan
from ..plan.progress import InitialState
from .base import StepResult, Wrap, non_finite_error
from .bulk_synchronous import BulkSynchronous

LOCAL_STEPS = 8

_LOSS, _COUNTED, _SKIPPED, _FLAGS = range(4)


class Local(BulkSynchronous):
    """Local SGD and elastic averaging; see ``base.Strategy`` for the methods.

    Construction, and ``finish`` in a step that averages, are collective over the workers.

    Args:
        hierarchy: The communication hierarchy of the workers; freed with this object.
        initial_state: Sets the initial values of vectors.
    """

    def __init__(self, hierarchy: Hierarchy, plan: Plan, initial_state: InitialState) -> None:
        size = plan.layout.size
        self._hierarchy, self._nan = hierarchy, plan.config.nan
        self._every = plan.config.local_steps or LOCAL_STEPS
        self._rho = plan.config.elastic_rho
        self._own: dict[str, Array] = {name: np.zeros(size, plan.dtype) for name in plan.vectors}
        self.vectors, self.has_average = plan.vectors, plan.moving_average is not None
        self.params, self.grads = self._own["params"], np.zeros(size, plan.dtype)
        step, data_cursor, _ = initial_state(self._own, 0)
        super().__init__(plan, hierarchy.comm.rank, step, data_cursor)
        self._center = self.params.copy() if self._rho is not None else None
        self._scratch: Array | None = None
        self._updater = plan.updater(self._own)
        self._mean = MeanAllreduce(hierarchy, size, plan.dtype)
        self._since = np.zeros(4)  # this worker's totals since the last average, exchanged at the next

    @property
    def settled(self) -> bool:
        return self.step % self._every == 0 or self.step == self._train_steps

    def begin(self, loss: float) -> None:
        if not math.isfinite(loss) and self._nan == "stop":
            losses = np.zeros(self._hierarchy.comm.size)
            losses[self._hierarchy.comm.rank] = loss
            raise non_finite_error(losses, self.step)
        self._step_loss = loss

    def ready(self, start: int) -> None:
        """Do nothing: no other worker needs this gradient."""

    def finish(self) -> None:
        loss = self._step_loss
        updated = math.isfinite(loss) or self._nan == "ignore"
        if updated:
            self._update()
            self._since[_LOSS] += loss
        self._since[_COUNTED if updated else _SKIPPED] += 1
        self._advance()
        if self.settled:
            self._average()
        self._result = StepResult(loss, updated)

    def close(self) -> None:
        if self._center is not None:
            self.params[:] = self._center

    def gather(self, name: str) -> Array:
        if self._center is None:
            return self._own[name]  # the same on all workers whenever they have just averaged
        if name == "params":
            return self._center
        if self._scratch is None:
            self._scratch = np.empty_like(self.params)
        self._scratch[:] = self._own[name]
        self._mean(self._scratch)
        return self._scratch

    def trace(self, wrap: Wrap) -> None:
        wrap(self, "_update", "update")
        wrap(self, "_average", "average")

    def free(self) -> None:
        self._hierarchy.free()

    def _update(self) -> None:
        size, rows = len(self.params), self.grads[np.newaxis]
        if not self._updater.needs_sums:
            self._updater.update(0, size, rows, self.step)
            return
        sums = self._updater.prepare(0, size, rows, self.grads, self.step)
        self._updater.finish(0, size, self.grads, sums, self.step)

    def _average(self) -> None:
        if self._center is None:
            for vector in self._own.values():
                self._mean(vector)
        else:
            self._average_elastically()
        self._agree()

    def _average_elastically(self) -> None:
        assert self._center is not None and self._rho is not None
        mean = self.params.copy()
        self._mean(mean)
        away: Any = self.params - self._center
        self.params -= self.params.dtype.type(self._rho) * away
        self._center += self.params.dtype.type(self._rho * self._hierarchy.comm.size) * (mean - self._center)

    def _agree(self) -> None:
        """Exchange the totals since the last average, and the flags. Collective over the workers."""
        comm = self._hierarchy.comm
        self._since[_FLAGS] = self._flags
        everyone = np.empty((comm.size, len(self._since)))
        comm.Allgather(self._since, everyone)
        loss, counted, skipped = everyone[:, :_FLAGS].sum(axis=0).tolist()
        self._loss, self._counted, self._skipped = (
            self._loss + loss,
            self._counted + int(counted),
            self._skipped + int(skipped),
        )
        self._hear(int(np.bitwise_or.reduce(everyone[:, _FLAGS].astype(np.int64))))
        self._since[:] = 0
