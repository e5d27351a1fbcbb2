"""Replicas of a model on several GPUs, with the bound vectors on the first GPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.layout import Array
from ..core.training_state import TrainingState
from ..gpu import ops
from .base import Model


class GpuExchange:
    """An ``Exchange`` that copies parameters to the other GPUs, and gradients to the first GPU, which sums them.

    Args:
        gpus: The GPU of each replica.
        states: The state of each replica; the loss scale of the first replica is copied to the others.
        size, dtype: The size and the type of the vectors.
    """

    def __init__(self, gpus: Sequence[Any], states: Sequence[TrainingState], size: int, dtype: np.dtype[Any]) -> None:
        self._gpus, self._size = gpus, size
        first, count = gpus[0], len(gpus)
        with first.activate():
            self._rows = first.zeros((count, size), dtype)
            self._losses = first.zeros((count, 1), np.float64)
            self._loss = first.zeros((1,), np.float64)
            self._in_order = first.copy_of(np.arange(count))
        self._copies: list[tuple[Array, Array]] = []  # parameters and gradients on the other GPUs
        for gpu in gpus[1:]:
            with gpu.activate():
                self._copies.append((gpu.zeros((size,), dtype), gpu.zeros((size,), dtype)))
        self._scales = [state.loss_scale for state in states]

    def bind(self, models: Sequence[Model], params: Array, grads: Array) -> None:
        self._params, self._grads = params, grads
        models[0].bind(params, self._rows[0])
        for model, (own_params, own_grads) in zip(models[1:], self._copies, strict=True):
            model.bind(own_params, own_grads)

    def send_params(self) -> None:
        first = self._gpus[0]
        with first.activate():
            current = first.compute.record()
        for gpu, (own_params, _), scale in zip(self._gpus[1:], self._copies, self._scales[1:], strict=True):
            with gpu.activate():
                gpu.compute.wait_event(current)
                gpu.compute.copy(self._params, own_params)
                if scale is not None:
                    gpu.compute.copy(self._scales[0], scale)

    def sum_losses(self, losses: list[Any]) -> Any:
        # Kept until the next step: freed memory may be reused and overwritten before it has been copied.
        self._kept = losses
        with self._gpus[0].activate():
            self._collect([(loss.reshape(1), self._losses[i]) for i, loss in enumerate(losses)])
            ops.sum_rows(self._losses, self._in_order, 0, 1, 1.0, self._loss)
        return self._loss

    def sum_grads(self) -> None:
        with self._gpus[0].activate():
            others = enumerate(self._copies, start=1)
            self._collect([(None, None), *((grads, self._rows[i]) for i, (_, grads) in others)])
            ops.sum_rows(self._rows, self._in_order, 0, self._size, 1.0, self._grads)

    def _collect(self, pairs: list[tuple[Any, Any]]) -> None:
        """Copy an array of each GPU, once it is computed, to an array of the first GPU; skip entries that are None."""
        first = self._gpus[0].compute
        for gpu, (source, target) in zip(self._gpus, pairs, strict=True):
            if source is None:
                continue
            with gpu.activate():
                done = gpu.compute.record()
            first.wait_event(done)
            first.copy(source, target)
        # The sources must not be overwritten before they are copied, for example by the next micro-batch.
        copied = first.record()
        for gpu in self._gpus[1:]:
            with gpu.activate():
                gpu.compute.wait_event(copied)


def states_of_replicas(gpus: Sequence[Any], state: TrainingState) -> list[TrainingState]:
    """Return the state of each replica: ``state`` itself, and copies with a loss scale on their own GPU."""
    states = [state]
    for gpu in gpus[1:]:
        other = copy.copy(state)
        if state.loss_scale is not None:
            with gpu.activate():
                other.loss_scale = gpu.zeros(state.loss_scale.shape, state.loss_scale.dtype)
        states.append(other)
    return states
