"""``--mode sync`` on GPUs: every worker has all parameters on its device, and updates all of them there.

The host enqueues a step without waiting for it: gradients, their sums over the workers, the decision whether to update,
and the update follow each other on the device. The loss is an extra last element of the gradient, so that all devices
sum it and make the same decision. The host reads it some steps later. If a loss is not finite and the run stops, the
parameters have not changed since.

``gpu.transport`` sums the gradients over the workers; a single worker needs no transport.
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

_LAG = 3  # maximum number of steps between the host and the last loss that it has read
_FIRST_SCALE = 65536.0  # of a loss in float16
# Keys in checkpoints: the loss scale, its number of good steps, and the prefix of the GPU transport's name.
_SCALE, _GOOD, _TRANSPORT = "loss_scale", "loss_scale_steps", "transport_"


@dataclass
class _PendingStep:
    """A step enqueued on the device.

    Attributes:
        extra_state: The results once ``done``: this worker's share of the loss, the total, whether there was an update.
        done: The event that marks completion.
    """

    step: int
    extra_state: Array
    done: Any


class SyncGpu(BulkSynchronous):
    """Synchronous training with the parameters on every worker's device; see ``base.Strategy`` for the methods.

    Construction is collective over the workers.

    Args:
        hierarchy: The communication hierarchy of the workers; freed with this object.
        device: This worker's device; the first if it has several.
        initial_state: Sets the initial values of vectors.
        say: Called with a line for the user.
    """

    on_device = True

    def __init__(
        self, hierarchy: Hierarchy, plan: Plan, device: Any, initial_state: InitialState, say: Callable[[str], None]
    ) -> None:
        from ..gpu import ops as launch
        from ..gpu.allreduce.select import select_transport
        from ..gpu.update import GpuUpdate

        self._hierarchy, self._device, self._nan, self._launch = hierarchy, device, plan.config.nan, launch
        size, dtype = plan.layout.size, plan.dtype
        self._host = {name: hierarchy.shared.allocate((size,), dtype) for name in plan.vectors}
        step, data_cursor, extra_state = initial_state(self._host if hierarchy.node.rank == 0 else None, 0)
        super().__init__(plan, hierarchy.comm.rank, step, data_cursor)
        self.vectors, self.has_average = plan.vectors, plan.moving_average is not None
        self._is_scaled = plan.config.precision == "float16"
        with device.activate():
            self._on_device = {name: device.copy_of(self._host[name]) for name in plan.vectors}
            self._sent = device.zeros((size + 1,), dtype)  # gaps between parameters must stay zero
            self._state = device.copy_of(self._first_state(extra_state))
            self._gpu_update = GpuUpdate(
                device, plan.optimizer, plan.layout, self._on_device, plan.moving_average, self._state
            )
        self.params, self.grads = self._on_device["params"], self._sent[:size]
        if self._is_scaled:
            self.loss_scale = self._state[launch.SCALE : launch.SCALE + 1]
        self._own_loss: Any = None
        self._buckets = _with_loss(plan.buckets)
        self._transport = None
        if hierarchy.comm.size > 1:
            requested = plan.config.gpu_transport
            before = next((name.removeprefix(_TRANSPORT) for name in extra_state if name.startswith(_TRANSPORT)), "")
            self._transport = select_transport(hierarchy, device, self._sent, self._buckets, requested, before, say)
        self._started = 0  # number of buckets in this step
        self._pending: deque[_PendingStep] = deque()
        self._free: list[_PendingStep] = []
        self._bad: tuple[int, float] | None = None  # the first step with a non-finite loss, and this worker's share
        self._waits = False
        self._noted = np.zeros(1, np.int64)
        self._all_noted = np.zeros(hierarchy.comm.size, np.int64)
        hierarchy.node.Barrier()  # no rank may gather into the host vectors before all have read the initial values

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
            self._record_result()
        flags = self._exchange_flags()
        self._advance()
        self._read(_LAG)
        self._hear(flags)

    @property
    def result(self) -> StepResult:
        self._collect_results(0)
        return self._result

    @property
    def extra_state(self) -> Mapping[str, float]:
        found = {} if self._transport is None else {_TRANSPORT + self._transport.name: 1.0}
        if self._is_scaled:
            launch, state = self._launch, np.empty(self._state.size)
            with self._device.activate():
                self._device.download(self._state, state)
            found |= {_SCALE: float(state[launch.SCALE]), _GOOD: float(state[launch.GOOD])}
        return found

    def totals(self) -> Totals:
        self._collect_results(0)
        return super().totals()

    def close(self) -> None:
        self._read(0)

    def gather(self, name: str) -> Array:
        self._read(0)
        node, host = self._hierarchy.node, self._host[name]
        if node.rank == 0:
            self._device.pin(host)
            with self._device.activate():
                self._device.download(self._on_device[name], host)
        node.Barrier()
        return host

    def on_device_copy(self, name: str) -> Array:
        self._read(0)
        return self._on_device[name]

    def trace(self, wrap: Wrap) -> None:
        self._waits = True
        wrap(self, "_average", "average")
        wrap(self, "_update", "update")

    def free(self) -> None:
        if self._transport is not None:
            self._transport.free()
        self._hierarchy.free()

    # Operations on the device.

    def _average(self) -> None:
        """Wait for the sum of all workers' gradients, on every device."""
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
        self._gpu_update(self.grads, self.step)
        if self._waits:
            self._device.compute.wait()

    def _record_result(self) -> None:
        """Enqueue a copy of the step's result to the host."""
        from ..gpu.stream import pinned

        pending = self._free.pop() if self._free else _PendingStep(0, pinned((3,), np.float64), None)
        launch, compute = self._launch, self._device.compute
        compute.copy_to_host(self._state[launch.OWN : launch.UPDATED + 1], pending.extra_state)
        pending.step, pending.done = self.step, compute.record(pending.done)
        self._pending.append(pending)

    def _first_state(self, extra_state: Mapping[str, float]) -> Array:
        """Return the device's state before the first step; ``extra_state`` may contain a resumed run's loss scale."""
        launch = self._launch
        state = np.zeros(launch.UPDATED + 1)
        state[launch.FACTOR] = state[launch.SCALE] = 1.0
        if self._is_scaled:
            state[launch.SCALE] = extra_state.get(_SCALE, _FIRST_SCALE)
            state[launch.GOOD] = extra_state.get(_GOOD, 0)
        return state

    # Results.

    def _exchange_flags(self) -> int:
        """Return the union of all workers' flags. Collective over the workers."""
        if self._hierarchy.comm.size == 1:
            return self._flags
        self._noted[0] = self._flags
        self._hierarchy.comm.Allgather(self._noted, self._all_noted)
        return int(np.bitwise_or.reduce(self._all_noted))

    def _collect_results(self, lag: int) -> None:
        """Count finished steps; wait for all but the last ``lag``."""
        while len(self._pending) > lag:
            pending = self._pending.popleft()
            pending.done.synchronize()
            own, total, updated = pending.extra_state.tolist()
            self._tally(total, bool(updated))
            if self._bad is None and not math.isfinite(total):
                self._bad = pending.step, own
            self._free.append(pending)

    def _read(self, lag: int) -> None:
        """Collect results, and stop on a non-finite loss. All workers do the same; collective over them if they stop.

        Raises:
            NonFiniteLoss: A loss is not finite and ``--nan`` is ``stop``.
        """
        self._collect_results(lag)
        if self._bad is None or self._nan != "stop" or self._bad[0] >= self.step - lag:
            return
        step, own = self._bad
        raise non_finite_error(np.array(self._hierarchy.comm.allgather(own)), step, on_all_ranks=True)


def _with_loss(buckets: list[Bucket]) -> list[Bucket]:
    """Return the buckets of the gradient with the loss as one more element."""
    first, *others = buckets
    return [Bucket(first.lo, first.hi + 1), *others]
