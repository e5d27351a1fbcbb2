"""``--mode sync`` on GPUs: every worker has all parameters on its device, and updates all of them there.

The host enqueues a step without waiting for the device. The device computes the gradients, sums them over the workers,
decides whether to update, and updates. The loss is an extra last element of the gradient, so that all devices sum it
and make the same decision; with virtual workers, each micro-batch has such an element. The host reads the loss some
steps later. If a loss is not finite and the run stops, neither that step nor a later step has changed the parameters.

``gpu.allreduce`` sums the gradients over the workers; a single worker needs no transport.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoint.snapshot import Snapshot
from ..comm.cluster import Cluster
from ..comm.hierarchy import hierarchy_of
from ..core.extra_state import ExtraState, Versioned, values_of
from ..core.layout import Array
from ..core.ranges import Bucket
from ..core.training_state import TrainingState
from ..monitor.trace import span
from ..optim.whole_tensors import WholeTensorOptimizer
from ..plan.plan import Plan
from ..plan.progress import Progress
from .base import Part, Stats, StepResult
from .bulk_synchronous import BulkSynchronous
from .tensor_updates import TensorUpdates

if TYPE_CHECKING:
    from ..gpu.allreduce.transport import GpuTransport

_LAG = 3  # maximum number of steps that the host has enqueued and whose losses it has not read
_TRANSPORT, _VERSION = "gpu_transport", 1  # namespace and version of this part of the extra state


@dataclass
class _PendingStep:
    """A step enqueued on the device.

    Attributes:
        results: Once ``done``: this worker's share of the loss, the total, whether there was an update.
        squared_norm: Once ``done``: squared norm of the gradient, shape (1,), if ``measured``.
        measured: Whether the norm was measured.
        done: The event that marks completion.
    """

    step: int
    results: Array
    squared_norm: Array
    measured: bool
    done: Any


class SyncGpu(BulkSynchronous):
    """Synchronous training with the parameters on every worker's device; see ``base.Strategy`` for the methods.

    ``devices[0]`` is this worker's device, or the first of several.
    """

    averages_grads = sums_grads = updates_whole_tensors = has_virtual_workers = True

    def __init__(self, cluster: Cluster, plan: Plan, devices: Sequence[Any], state: TrainingState) -> None:
        from ..gpu.grad_scaler import GradScaler
        from ..gpu.ops.updates import copy_loss
        from ..gpu.update import GpuUpdate

        super().__init__(cluster, plan)
        config, device = plan.config, devices[0]
        virtual, by_host = config.virtual_workers, config.device.gpu_transport in ("auto", "host")
        n_rows = cluster.training.node.allreduce(len(self._share.additions))
        vectors = len(plan.vectors) + (n_rows + 1 if by_host else 0)
        self._hierarchy = hierarchy = hierarchy_of(cluster, vectors * plan.nbytes, config.parallel.shared_memory)
        self._device, self._copy_loss = device, copy_loss
        size, dtype = plan.layout.size, plan.dtype
        self._host = {name: hierarchy.shared.allocate((size,), dtype) for name in plan.vectors}
        self.initial_vectors = self._host if hierarchy.node.rank == 0 else None
        with device.activate():
            self._on_device = {name: device.empty((size,), dtype) for name in plan.vectors}
            # Gaps between parameters must stay zero.
            self._sent = [device.zeros((size + 1,), dtype) for _ in self._share.additions]
            self._scaler = GradScaler(device, config.device.precision == "float16", config.training.nan)
            state.loss_scale = self._scaler.scale
            how = plan.optimizer, plan.layout, self._on_device, plan.moving_average
            self._gpu_update = GpuUpdate(device, *how, self._scaler.state, state.frozen)
        self._updater = self._gpu_update.updater
        if isinstance(plan.optimizer, WholeTensorOptimizer):  # every worker updates all tensors
            self.tensors = TensorUpdates(plan.optimizer, plan.layout, state.frozen, (0, size))
        self.params, self.grads = self._on_device["params"], self._sent[-1][:size]
        self._loss_sum_on_device = self._sent[-1][-1:]
        if virtual is not None:
            self.sums, self.sums_losses = self._sent, True
        self._buckets = _with_loss(plan.buckets)
        self._transport: GpuTransport | None = None
        self._started = 0  # number of buckets whose sum has begun since ``begin``
        self._has_averaged = False  # whether this step has averaged
        self._squared_norm: Any = None  # squared norm of this step's gradient, on the device, if it was measured
        self._pending: deque[_PendingStep] = deque()
        self._free: list[_PendingStep] = []
        # The first step whose loss ends the run, and this worker's share of the loss.
        self._bad: tuple[int, float] | None = None
        self._own_flags = np.zeros(1, np.int64)
        self._all_flags = np.zeros(hierarchy.comm.size, np.int64)

    def start(self, progress: Progress, extra_state: ExtraState) -> None:
        from ..gpu.allreduce.select import select_transport

        super().start(progress, extra_state)
        hierarchy, device = self._hierarchy, self._device
        with device.activate():
            for name, host in self._host.items():
                device.upload(host, self._on_device[name])
            self._scaler.load_extra_state(extra_state)
        if hierarchy.comm.size > 1:
            before = str(values_of(extra_state, _TRANSPORT, _VERSION).get("name", ""))
            requested = self.plan.config.device.gpu_transport
            virtual = self.plan.config.virtual_workers
            how = hierarchy, device, self._sent, self._buckets, virtual
            self._transport = select_transport(*how, requested, before)
        hierarchy.node.Barrier()  # no rank may change the host vectors before all have read the initial values

    def begin(self, loss: Any) -> None:
        super().begin(loss.reshape(1))
        self._started = 0
        if self._transport is not None and not self.sums_losses:
            with self._device.activate():
                self._copy_loss(self.loss, self._loss_sum_on_device)

    def begin_backward(self, kept: float | None, averages: bool) -> None:
        with self._device.activate():
            super().begin_backward(kept, averages)

    def ready(self, start: int) -> None:
        if self._transport is None:
            return
        with self._device.activate():
            while self._started < len(self._buckets) and self._buckets[self._started].lo >= start:
                self._transport.start(self._started)
                self._started += 1

    @span("average")
    def average(self) -> None:
        with self._device.activate():
            if self._transport is not None:
                self._transport.finish()
                self._wait_if_traced()
            is_summed = self.sums_losses or self._transport is not None
            self._scaler.decide(self.grads, self.loss, self._loss_sum_on_device if is_summed else self.loss)
        self._has_averaged = True

    @span("update")
    def update(self, part: Part | None = None) -> None:
        with self._device.activate():
            # The device decides whether ``_gpu_update`` has an effect; torch's optimizers run on the host's order.
            if self.tensors is not None and self._scaler.accepts():
                self.tensors.update(self.grads, None if part is None else part.names)
            self._squared_norm = self._gpu_update(self.grads, self.rule_step, self.measures_norm)
            self._wait_if_traced()

    def end_step(self, updated: bool, complete: bool) -> None:
        if self._has_averaged:
            with self._device.activate():
                self._record_result(updated)
            self.advance()
        else:
            self._count_local_step()
        self._has_averaged = False
        self.step_offset -= not updated
        flags = self._exchange_flags()
        if complete or self.progress.step >= self.plan.train_steps:
            self.enter_consistent_point(flags)
        self._read(0 if self.has_ended else _LAG)

    def _count_local_step(self) -> None:
        """Count a step that has not averaged. Collective over the workers; waits for the device."""
        self._collect_results(0)
        losses = np.array(self._hierarchy.comm.allgather(float(self.loss[0])))
        self.accept(losses)
        self.count(float(losses.sum()), True)

    @property
    def result(self) -> StepResult:
        self._collect_results(0)
        return self.last_result

    def stats(self) -> Stats:
        self._collect_results(0)
        return super().stats()

    def vector(self, name: str) -> Array:
        self._read(0)
        return self._on_device[name]

    def snapshot(self) -> Snapshot:
        self._read(0)
        self.await_release()
        if self._hierarchy.node.rank == 0:
            for name, host in self._host.items():
                self._device.pin(host)
                with self._device.activate():
                    self._device.download(self._on_device[name], host)
        return self.snapshot_of(self._host)

    def set_params(self, parts: Sequence[tuple[int, Array]]) -> None:
        self._read(0)
        with self._device.activate():
            for start, values in parts:
                place = self.params[start : start + len(values)]
                if self._device.owns(values):
                    place[...] = values
                else:
                    self._device.upload(values, place)

    def move_to(self, progress: Progress) -> None:
        self._read(0)
        super().move_to(progress)

    def memory_use(self) -> dict[str, int]:
        return {"parameters, slots, gradient": (len(self._on_device) + len(self._sent)) * self.plan.nbytes}

    def close(self) -> None:
        if self._transport is not None:
            self._transport.free()
        self._hierarchy.free()

    # Operations on the device.

    def _wait_if_traced(self) -> None:
        """Wait for the device, so that durations can be measured."""
        if self.plan.config.output.trace:
            self._device.compute.wait()

    def _record_result(self, updated: bool) -> None:
        """Enqueue a copy of the step's result to the host."""
        from ..gpu.stream import pinned

        if self._free:
            pending = self._free.pop()
        else:
            pending = _PendingStep(0, pinned((3,), np.float64), pinned((1,), np.float64), False, None)
        compute = self._device.compute
        compute.copy_to_host(self._scaler.results, pending.results)
        pending.measured = self.measures_norm and updated
        if pending.measured:
            compute.copy_to_host(self._squared_norm, pending.squared_norm)
        pending.step, pending.done = self.progress.step, compute.record(pending.done)
        self._pending.append(pending)

    # Results.

    def extra_state(self) -> ExtraState:
        transport = self._transport
        state = {} if transport is None else {_TRANSPORT: Versioned(_VERSION, {"name": transport.name})}
        with self._device.activate():
            return {**super().extra_state(), **state, **self._scaler.extra_state()}

    def _exchange_flags(self) -> int:
        """Return the union of all workers' flags. Collective over the workers."""
        if self._hierarchy.comm.size == 1:
            return self.flags
        self._own_flags[0] = self.flags
        self._hierarchy.comm.Allgather(self._own_flags, self._all_flags)
        return int(np.bitwise_or.reduce(self._all_flags))

    def _collect_results(self, lag: int) -> None:
        """Count finished steps; wait for all but the last ``lag``."""
        while len(self._pending) > lag:
            pending = self._pending.popleft()
            pending.done.synchronize()
            own, total, updated = pending.results.tolist()
            self.tally(total, bool(updated))
            if pending.measured:
                self.grad_norm = math.sqrt(pending.squared_norm[0]) if updated else None
            if self._bad is None and self.non_finite.ends_run(total):
                self._bad = pending.step, own
            self._free.append(pending)

    def _read(self, lag: int) -> None:
        """Collect results, and stop on a non-finite loss. All workers do the same; collective over them if they stop.

        Raises:
            NonFiniteLoss: A loss is not finite and ``--nan`` is ``stop``.
        """
        self._collect_results(lag)
        if self._bad is None or self._bad[0] >= self.progress.step - lag:
            return
        step, own = self._bad
        raise self.non_finite.error(np.array(self._hierarchy.comm.allgather(own)), step, on_all_ranks=True)


def _with_loss(buckets: list[Bucket]) -> list[Bucket]:
    """Return the buckets of the gradient with the loss as one more element."""
    first, *others = buckets
    return [Bucket(first.lo, first.hi + 1), *others]
