"""``--mode sync`` on GPUs: every worker has all parameters on its device, and updates all of them there.

The host asks for a step and goes on: gradients, their sums over the workers, the decision whether to update and the
update follow each other on the device. The loss is a last element of the gradient, so that all devices sum it and come
to the same decision. The host reads it some steps later, when it is there; where a loss is not finite and the run is to
stop, the parameters have not changed since.

How sums travel is ``gpu.transport``'s; with one worker nothing does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..comm.hierarchy import Hierarchy
from ..core.layout import Array
from ..core.ranges import Bucket
from ..plan.plan import Plan
from ..plan.progress import InitialState
from .base import StepResult, Totals, Wrap, non_finite_error
from .bulk_synchronous import BulkSynchronous

_LAG = 3  # steps that the host may be ahead of the last loss that it has read
_FIRST_SCALE = 65536.0  # of a loss in float16
# In checkpoints: the scale, and for how many steps it has been good; and before its name how gradients travelled.
_SCALE, _GOOD, _WAY = "loss_scale", "loss_scale_steps", "transport_"


@dataclass
class _Asked:
    """A step that the device has been asked for.

    Attributes:
        numbers: This worker's share of the loss, all workers', and whether there was an update: when it is done.
        done: The event that tells when.
    """

    step: int
    extra_state: Array
    done: Any


class SyncGpu(BulkSynchronous):
    """Synchronous training of parameters that lie on every worker's device; see ``base.Strategy`` for its methods.

    Construction is collective over the workers.

    Args:
        hierarchy: How the workers reach each other; freed with this.
        device: This worker's, the first if it has several.
        fill: Gives vectors their first values.
        say: Takes a line for the user.
    """

    on_device = True

    def __init__(
        self, hierarchy: Hierarchy, plan: Plan, device: Any, fill: InitialState, say: Callable[[str], None]
    ) -> None:
        from ..gpu import ops as launch
        from ..gpu.allreduce.select import select_transport
        from ..gpu.update import GpuUpdate

        self._hierarchy, self._device, self._nan, self._launch = hierarchy, device, plan.config.nan, launch
        size, dtype = plan.layout.size, plan.dtype
        self._host = {name: hierarchy.shared.allocate((size,), dtype) for name in plan.vectors}
        step, data_cursor, extra_state = fill(self._host if hierarchy.node.rank == 0 else None, 0)
        super().__init__(plan, hierarchy.comm.rank, step, data_cursor)
        self.vectors, self.has_average = plan.vectors, plan.moving_average is not None
        self._is_scaled = plan.config.precision == "float16"
        with device.activate():
            self._there = {name: device.copy_of(self._host[name]) for name in plan.vectors}
            self._sent = device.zeros((size + 1,), dtype)  # the gaps between parameters stay so
            self._state = device.copy_of(self._first_state(extra_state))
            self._update_there = GpuUpdate(
                device, plan.optimizer, plan.layout, self._there, plan.moving_average, self._state
            )
        self.params, self.grads = self._there["params"], self._sent[:size]
        if self._is_scaled:
            self.loss_scale = self._state[launch.SCALE : launch.SCALE + 1]
        self._own_loss: Any = None
        self._buckets = _with_loss(plan.buckets)
        self._transport = None
        if hierarchy.comm.size > 1:
            asked = plan.config.gpu_transport
            before = next((name.removeprefix(_WAY) for name in extra_state if name.startswith(_WAY)), "")
            self._transport = select_transport(hierarchy, device, self._sent, self._buckets, asked, before, say)
        self._started = 0  # buckets of this step
        self._asked: deque[_Asked] = deque()
        self._free: list[_Asked] = []
        self._bad: tuple[int, float] | None = None  # the first step whose loss was not finite, and this worker's share
        self._waits = False
        self._noted = np.zeros(1, np.int64)
        self._all_noted = np.zeros(hierarchy.comm.size, np.int64)
        hierarchy.node.Barrier()  # nobody completes a vector before all have taken its first values

    def begin(self, loss: Any) -> None:
        self._own_loss = loss.reshape(1)
        self._started = 0
        if self._transport is not None:
            with self._device.activate():
                self._launch.note_loss(self._own_loss, self._sent[-1:])

    def ready(self, start: int) -> None:
        if self._transport is None:
            return
        with self._device.activate():
            while self._started < len(self._buckets) and self._buckets[self._started].lo >= start:
                self._transport.start(self._started)
                self._started += 1

    def finish(self) -> None:
        with self._device.activate():
            self._average()
            self._update()
            self._ask()
        flags = self._exchange_flags()
        self._advance()
        self._read(_LAG)
        self._hear(flags)

    @property
    def result(self) -> StepResult:
        self._look(0)
        return self._result

    @property
    def extra_state(self) -> Mapping[str, float]:
        found = {} if self._transport is None else {_WAY + self._transport.name: 1.0}
        if self._is_scaled:
            launch, state = self._launch, np.empty(self._state.size)
            with self._device.activate():
                self._device.download(self._state, state)
            found |= {_SCALE: float(state[launch.SCALE]), _GOOD: float(state[launch.GOOD])}
        return found

    def totals(self) -> Totals:
        self._look(0)
        return super().totals()

    def close(self) -> None:
        self._read(0)

    def gather(self, name: str) -> Array:
        self._read(0)
        node, host = self._hierarchy.node, self._host[name]
        if node.rank == 0:
            self._device.pin(host)
            with self._device.activate():
                self._device.download(self._there[name], host)
        node.Barrier()
        return host

    def on_device_copy(self, name: str) -> Array:
        self._read(0)
        return self._there[name]

    def trace(self, wrap: Wrap) -> None:
        self._waits = True
        wrap(self, "_average", "average")
        wrap(self, "_update", "update")

    def free(self) -> None:
        if self._transport is not None:
            self._transport.free()
        self._hierarchy.free()

    # What the device is asked for.

    def _average(self) -> None:
        """The sum of all workers' gradients, on every device."""
        if self._transport is not None:
            self._transport.finish()
            if self._waits:
                self._device.compute.wait()

    def _update(self) -> None:
        launch, state = self._launch, self._state
        if self._is_scaled:
            launch.find_overflow(self.grads, state[launch.OVERFLOW : launch.OVERFLOW + 1])
        total = self._own_loss if self._transport is None else self._sent[-1:]
        launch.decide_update(self._own_loss, total, self._nan, self._is_scaled, state)
        self._update_there(self.grads, self.step)
        if self._waits:
            self._device.compute.wait()

    def _ask(self) -> None:
        """Have the step's result copied here when it is there."""
        from ..gpu.stream import pinned

        asked = self._free.pop() if self._free else _Asked(0, pinned((3,), np.float64), None)
        launch, compute = self._launch, self._device.compute
        compute.copy_to_host(self._state[launch.OWN : launch.UPDATED + 1], asked.extra_state)
        asked.step, asked.done = self.step, compute.record(asked.done)
        self._asked.append(asked)

    def _first_state(self, extra_state: Mapping[str, float]) -> Array:
        """The device's state before the first step; ``extra_state``: of the run that goes on, if it had a scale."""
        launch = self._launch
        state = np.zeros(launch.UPDATED + 1)
        state[launch.FACTOR] = state[launch.SCALE] = 1.0
        if self._is_scaled:
            state[launch.SCALE] = extra_state.get(_SCALE, _FIRST_SCALE)
            state[launch.GOOD] = extra_state.get(_GOOD, 0)
        return state

    # What has become of it.

    def _exchange_flags(self) -> int:
        """The union of all workers' flags."""
        if self._hierarchy.comm.size == 1:
            return self._flags
        self._noted[0] = self._flags
        self._hierarchy.comm.Allgather(self._noted, self._all_noted)
        return int(np.bitwise_or.reduce(self._all_noted))

    def _look(self, lag: int) -> None:
        """Count the steps that are done, and wait for all but the last ``lag``."""
        while len(self._asked) > lag:
            asked = self._asked.popleft()
            asked.done.synchronize()
            own, total, updated = asked.extra_state.tolist()
            self._tally(total, bool(updated))
            if self._bad is None and not math.isfinite(total):
                self._bad = asked.step, own
            self._free.append(asked)

    def _read(self, lag: int) -> None:
        """The same on all workers alike, which then end together if a loss was not finite; collective if so.

        Raises:
            NonFiniteLoss: And the run is to stop then.
        """
        self._look(lag)
        if self._bad is None or self._nan != "stop" or self._bad[0] >= self.step - lag:
            return
        step, own = self._bad
        raise non_finite_error(np.array(self._hierarchy.comm.allgather(own)), step, on_all_ranks=True)


def _with_loss(buckets: list[Bucket]) -> list[Bucket]:
    """The buckets of a vector that has the loss as one element more."""
    first, *others = buckets
    return [Bucket(first.lo, first.hi + 1), *others]
