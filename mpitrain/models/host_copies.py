"""Vectors in host memory for a model that computes on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import numpy as np

from ..core.extra_state import ExtraState
from ..core.layout import Array
from ..core.ranges import OnReady, announce_nothing
from ..data.batch import Batch
from ..gpu.device import Gpu
from ..gpu.stream import Stream, pinned
from ..plan.metric import Totals
from .base import Model, OnOutputs, SteppedModel


class HostLoss:
    """A loss that is being copied to the host; ``float`` waits for it.

    Args:
        value: Shape (1,), float64, pinned.
        copied: The event of the copy.
    """

    def __init__(self, value: Array, copied: Any) -> None:
        self._value, self._copied = value, copied

    def __float__(self) -> float:
        self._copied.synchronize()
        return float(self._value[0])


class HostCopies(Model):
    """Lets a model on a GPU compute with vectors in host memory.

    Parameters are copied to the GPU when they have changed. Ranges of the gradient are copied to the host when they are
    final, while the GPU computes the others.

    Args:
        model: Computes with vectors on ``gpu``.
        size, dtype: The size and the type of the vectors.
        overlaps: Whether to copy ranges during the backward pass; else the whole gradient afterwards.

    Attributes:
        grads: The bound gradient.
    """

    def __init__(self, model: Model, gpu: Gpu, size: int, dtype: np.dtype[Any], overlaps: bool) -> None:
        self._model, self._gpu, self._size, self._overlaps = model, gpu, size, overlaps
        self.accepts_raw = model.accepts_raw
        with gpu.activate():
            self._params_on_gpu, self._grads_on_gpu = gpu.zeros((size,), dtype), gpu.zeros((size,), dtype)
            self._to_host_stream = Stream()
        self._is_bound, self._complete_from = False, size
        self._loss, self._loss_copied = pinned((1,), np.float64), None
        self._pending: list[tuple[int, Any]] = []  # starts of gradients being copied, and the copies' events

    def bind(self, params: Array, grads: Array) -> None:
        if not self._is_bound:  # these vectors are copied at every step, later vectors perhaps once
            self._gpu.pin(params)
            self._gpu.pin(grads)
            self._model.bind(self._params_on_gpu, self._grads_on_gpu)
            self._is_bound = True
        self._params, self.grads = params, grads
        self.load_params()

    def load_params(self) -> None:
        with self._gpu.activate():
            self._gpu.compute.copy_to_device(self._params, self._params_on_gpu)
        self._model.load_params()

    def begin_step(self, batch: Batch) -> None:
        self._model.begin_step(batch)

    def compute_loss(self, batch: Batch) -> Any:
        return self.copied_loss(self._model.compute_loss(batch))

    def compute_grads(self, on_ready: OnReady) -> None:
        copies = self._overlaps and on_ready is not announce_nothing
        self._model.compute_grads(self._copy_from if copies else announce_nothing)
        self.complete_copies(on_ready)

    def evaluate(self, batch: Batch, on_outputs: OnOutputs | None = None) -> Totals:
        return self._model.evaluate(batch, on_outputs)

    def predict(self, batch: Batch) -> Array:
        return self._model.predict(batch)

    def freeze(self, flags: Array) -> None:
        self._model.freeze(flags)

    def extra_state(self) -> ExtraState:
        return self._model.extra_state()

    def load_extra_state(self, state: ExtraState) -> None:
        self._model.load_extra_state(state)

    def memory(self, count: int) -> tuple[Array, Array] | None:
        return self._model.memory(count)

    def has_room(self, examples: Array, labels: Array) -> bool:
        return self._model.has_room(examples, labels)

    def cache_dataset(self, examples: Array, labels: Array) -> None:
        self._model.cache_dataset(examples, labels)

    def memory_use(self) -> dict[str, int]:
        copies = self._params_on_gpu.nbytes + self._grads_on_gpu.nbytes
        return {"parameters, gradient": copies, **self._model.memory_use()}

    def activate(self) -> AbstractContextManager[object]:
        return self._gpu.activate()

    def close(self) -> None:
        self._model.close()

    @cached_property
    def stepped(self) -> SteppedHostCopies:
        return SteppedHostCopies(self, self._model.stepped)

    # Copies.

    def copied_loss(self, loss: Array) -> HostLoss:
        """Start to copy a loss to the host."""
        with self._gpu.activate():
            self._to_host_stream.wait_event(self._gpu.compute.record())
            self._to_host_stream.copy_to_host(loss, self._loss)
            self._loss_copied = self._to_host_stream.record(self._loss_copied)
            self._loss_on_gpu = loss  # the pool would reuse freed memory before it is copied
        return HostLoss(self._loss, self._loss_copied)

    def load_grads(self, grads: Array) -> None:
        """Copy a gradient to the GPU."""
        with self._gpu.activate():
            self._gpu.compute.copy_to_device(grads, self._grads_on_gpu)

    def copy_grads_to(self, grads: Array) -> None:
        """Copy the gradient on the GPU to the host."""
        with self._gpu.activate():
            self._to_host_stream.wait_event(self._gpu.compute.record())
            self._to_host_stream.copy_to_host(self._grads_on_gpu, grads)
            self._to_host_stream.wait()

    def _copy_from(self, start: int) -> None:
        """Start to copy ``grads[start:]``, which is final. PyTorch calls this method in a thread of its own."""
        with self._gpu.activate():
            self._copy_range(start)
            self._pending.append((start, self._to_host_stream.record()))

    def _copy_range(self, start: int) -> None:
        """Start to copy ``grads[start:]`` to the host, except what has been copied already."""
        part = slice(start, self._complete_from)
        self._to_host_stream.wait_event(self._gpu.compute.record())
        self._to_host_stream.copy_to_host(self._grads_on_gpu[part], self.grads[part])
        self._complete_from = start

    def complete_copies(self, on_ready: OnReady) -> None:
        """Copy the rest of the gradient, and report ranges as they arrive on the host; return when all have arrived."""
        with self._gpu.activate():
            self._copy_range(0)
            self._complete_from = self._size
            pending, self._pending = self._pending, []
            for start, copied in pending:
                copied.synchronize()
                on_ready(start)
            self._to_host_stream.wait()


class SteppedHostCopies:
    """Implements ``SteppedModel`` for ``HostCopies``, with the members of the model's own ``SteppedModel``."""

    copies_params, copies_grads = False, True

    def __init__(self, copies: HostCopies, model: SteppedModel) -> None:
        self._copies, self._model, self._shown = copies, model, copies.grads
        self.use_device, self.begin_forward, self.add_loss = model.use_device, model.begin_forward, copies.add_loss
        self.hide_grads, self.note_frozen, self.inference = model.hide_grads, model.note_frozen, model.inference
        self.mark_updated, self.check_data_pointers = model.mark_updated, model.check_data_pointers
        self.seed = model.seed

    def end_forward(self, loss: Any, count: int, factor: float = 1.0) -> Any:
        return self._copies.copied_loss(self._model.end_forward(loss, count, factor))

    def backward(
        self, on_ready: OnReady, kept: Collection[str] | None = (), computed: Collection[str] | None = None
    ) -> None:
        self._model.backward(announce_nothing, kept, computed)
        self._copies.complete_copies(on_ready)

    def show_grads_in(self, shown: Array, fetch: Callable[[], None]) -> None:
        self._shown = shown

    def collect_grads(self, fetch: Callable[[], None]) -> None:
        fetch()
        self._model.collect_grads(fetch)
        self._copies.copy_grads_to(self._shown)

    def load_grads(self) -> None:
        self._copies.load_grads(self._copies.grads)

    def show_grads(self) -> None:
        self._copies.load_grads(self._shown)
        self._model.show_grads()

    def show_params(self) -> None:
        """Do nothing: ``load_params`` copies the parameters to the GPU in each step; scripts must not change them."""

    store_params = record_params = check_params = show_params
