"""``--mode sync`` on GPUs: every worker has all parameters on its device, and updates all of them there.

A step has three phases:

1. *down*: the gradient leaves the device, for memory that the ranks of the node share.
2. *sum*: every rank sums its own part over the node, and with several nodes the sums travel (see ``comm.mean``).
3. *up*: the sum goes to every device, which updates its parameters by it: the same arithmetic on the same bits.

With one worker the gradient stays where it is. The order of sums is that of ``sync``.
"""

from __future__ import annotations

import math

import numpy as np

from ..comm.hierarchy import Hierarchy
from ..comm.mean import Mean
from ..device import Device
from ..params import Array
from ..plan import Plan
from .base import Fill, StepResult, Wrap, not_finite
from .lockstep import Lockstep


class Resident(Lockstep):
    """Synchronous training of parameters that lie on every worker's device; see ``base.Strategy`` for its methods.

    Construction is collective over the workers.

    Args:
        hierarchy: How the workers reach each other; freed with this.
        device: This worker's.
        fill: Gives vectors their first values.
    """

    def __init__(self, hierarchy: Hierarchy, plan: Plan, device: Device, fill: Fill) -> None:
        self._hierarchy, self._device, self._nan = hierarchy, device, plan.config.nan
        size, dtype, shared = plan.layout.size, plan.dtype, hierarchy.shared
        self._host = {name: shared.allocate((size,), dtype) for name in plan.vectors}
        step, position = fill(self._host if hierarchy.node.rank == 0 else None, 0)
        super().__init__(plan, hierarchy.comm.rank, step, position)
        self.vectors, self.has_average = plan.vectors, plan.moving is not None
        with device.here():
            self._there = {name: device.empty((size,), dtype) for name in plan.vectors}
            for name, vector in self._there.items():
                device.pin(self._host[name])
                device.upload(self._host[name], vector)
            self.grads = device.empty((size,), dtype)
            self.grads[...] = 0  # the gaps between parameters stay so
            self._updater = plan.updater(self._there, device)
        self.params = self._there["params"]
        self._sum = Mean(hierarchy, size, dtype, scale=1.0) if hierarchy.comm.size > 1 else None
        self._noted = np.zeros(2)
        self._all_noted = np.zeros((hierarchy.comm.size, 2))
        hierarchy.node.Barrier()  # nobody completes a vector before all have taken its first values

    def begin(self, loss: float) -> None:
        self._noted[:] = loss, self._flags

    def ready(self, start: int) -> None:
        """Nothing to do: the gradient leaves the device in one go."""

    def finish(self) -> StepResult:
        self._hierarchy.comm.Allgather(self._noted, self._all_noted)
        losses = self._all_noted[:, 0]
        loss = sum(losses.tolist())
        finite = math.isfinite(loss)
        if not finite and self._nan == "stop":
            error = not_finite(losses, self.step)
            error.everywhere = True  # all see all losses
            raise error
        updated = finite or self._nan == "ignore"
        if updated:
            with self._device.here():
                self._average()
                self._update()
        self._hear(int(np.bitwise_or.reduce(self._all_noted[:, 1].astype(np.int64))))
        return self._count(loss, updated)

    def complete(self, name: str) -> Array:
        node, host = self._hierarchy.node, self._host[name]
        if node.rank == 0:
            with self._device.here():
                self._device.download(self._there[name], host)
        node.Barrier()
        return host

    def computable(self, name: str) -> Array:
        return self._there[name]

    def trace(self, wrap: Wrap) -> None:
        wrap(self, "_average", "average")
        wrap(self, "_update", "update")

    def free(self) -> None:
        self._hierarchy.free()

    def _average(self) -> None:
        """The sum of all workers' gradients, on every device."""
        if self._sum is not None:
            self._device.download(self.grads, self._sum.own)
            self._device.upload(self._sum.combined(), self.grads)

    def _update(self) -> None:
        updater, size, rows = self._updater, len(self.params), self.grads[np.newaxis]
        if not updater.needs_sums:
            updater.update(0, size, rows, self.step)
            return
        sums = updater.prepare(0, size, rows, self.grads, self.step)
        updater.finish(0, size, self.grads, sums, self.step)
