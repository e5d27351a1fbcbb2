"""Several GPUs per rank, with gradients summed on the first one if the parameters are there."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..core.layout import Array
from ..core.ranges import OnReady, announce_nothing
from ..core.training_state import TrainingState
from ..data.batch import Batch
from ..gpu import ops
from ..plan.job import Job
from ..plan.plan import Plan
from .towers import MakeOne, SumOver, Towers


class GpuTowers(Towers):
    """Towers on GPUs.

    If the bound vectors are on the first GPU, parameters are copied from it to the others, and gradients are copied to
    it and summed there. If they are in host memory, each tower exchanges data with the host.
    """

    def __init__(
        self, make: MakeOne, job: Job, plan: Plan, devices: Sequence[Any], state: TrainingState, sum_over: SumOver
    ) -> None:
        self._scales: list[Array] = []  # of the loss, on the other GPUs
        super().__init__(make, job, plan, devices, state, sum_over)
        self._gpus, self._dtype = devices, plan.dtype
        self._resident = False
        # Arrays on the first GPU, and their copies on the others: first the parameters.
        self._sent: list[tuple[Array, list[Array]]] = [(self._rows, [])]
        if state.loss_scale is not None:
            self._sent.append((state.loss_scale, self._scales))

    def _states(self, devices: Sequence[Any], state: TrainingState) -> list[TrainingState]:
        states = [state]
        for gpu in devices[1:]:
            other = copy.copy(state)
            if state.loss_scale is not None:
                with gpu.activate():
                    other.loss_scale = gpu.zeros(state.loss_scale.shape, state.loss_scale.dtype)
                    self._scales.append(other.loss_scale)
            states.append(other)
        return states

    def bind(self, params: Array, grads: Array) -> None:
        first = self._gpus[0]
        self._resident = first.owns(params)
        if not self._resident:
            super().bind(params, grads)
            return
        self.grads = grads
        if not first.owns(self._rows):
            self._allocate()
        self._sent = [(params, [own for own, _ in self._copies]), *self._sent[1:]]
        self._towers[0].bind(params, self._rows[0])
        for tower, (own_params, own_grads) in zip(self._towers[1:], self._copies, strict=True):
            tower.bind(own_params, own_grads)

    def load_params(self) -> None:
        if not self._resident:
            super().load_params()
            return
        with self.activate():
            current = self._gpus[0].compute.record()
        for i, gpu in enumerate(self._gpus[1:]):
            with gpu.activate():
                gpu.compute.wait_event(current)
                for source, targets in self._sent:
                    gpu.compute.copy(source, targets[i])

    def compute_loss(self, batch: Batch) -> Any:
        if not self._resident:
            return super().compute_loss(batch)
        # Kept until the next step: freed memory may be reused and overwritten before it has been copied.
        self._kept = losses = self._compute_losses(batch)
        with self.activate():
            self._gather([(loss.reshape(1), self._losses[i]) for i, loss in enumerate(losses)])
            ops.sum_rows(self._losses, self._in_order, 0, 1, 1.0, self._loss)
        return self._loss

    def compute_grads(self, on_ready: OnReady) -> None:
        if not self._resident:
            super().compute_grads(on_ready)
            return
        self._on_all(lambda index: self._towers[index].compute_grads(announce_nothing))
        with self.activate():
            others = enumerate(self._copies, start=1)
            self._gather([(None, None), *((grads, self._rows[i]) for i, (_, grads) in others)])
            ops.sum_rows(self._rows, self._in_order, 0, self._size, 1.0, self.grads)

    def hold(self, examples: Array, labels: Array) -> bool:
        # Each tower takes a part of a batch, of any examples, so each holds all of them.
        has_room = all(gpu.has_room(examples, labels) for gpu in self._gpus)
        return has_room and all(tower.hold(examples, labels) for tower in self._towers)

    def add_loss(self, total: Any, loss: Any) -> Any:
        return self._towers[0].add_loss(total, loss) if self._resident else super().add_loss(total, loss)

    def memory_use(self) -> dict[str, int]:
        return self._towers[0].memory_use()

    def activate(self) -> AbstractContextManager[object]:
        return self._towers[0].activate()

    def to_host(self, vector: Array) -> Array:
        return self._towers[0].to_host(vector) if self._resident else vector

    def _allocate(self) -> None:
        count = len(self._gpus)
        first = self._gpus[0]
        with first.activate():
            self._rows = first.zeros((count, self._size), self._dtype)
            self._losses = first.zeros((count, 1), np.float64)
            self._loss = first.zeros((1,), np.float64)
            self._in_order = first.copy_of(np.arange(count))
        self._copies = []
        for gpu in self._gpus[1:]:
            with gpu.activate():
                self._copies.append((gpu.zeros((self._size,), self._dtype), gpu.zeros((self._size,), self._dtype)))

    def _gather(self, pairs: list[tuple[Any, Any]]) -> None:
        """Copy an array of each GPU to an array of the first once it is computed; skip entries that are None."""
        first = self._gpus[0].compute
        for gpu, (source, target) in zip(self._gpus, pairs, strict=True):
            if source is None:
                continue
            with gpu.activate():
                done = gpu.compute.record()
            first.wait_event(done)
            first.copy(source, target)
        # The sources must not be overwritten before that, for example by the next micro-batch.
        copied = first.record()
        for gpu in self._gpus[1:]:
            with gpu.activate():
                gpu.compute.wait_event(copied)
