"""A model on a GPU: loss and gradient of a batch, computed asynchronously to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.layout import Array, Layout
from ..data.split import Split
from ..gpu import ops as launch
from ..gpu.device import Gpu
from ..gpu.graphs import StepGraphs
from ..gpu.staging import BatchStager, StagingBuffer
from ..gpu.stream import Stream, pinned
from ..nn.layer import Context, Layer, SumOverWorkers, walk
from ..nn.loss import Loss
from .base import Model
from .native import NativeModel

_WARM_UPS = 2  # steps before recording, which compile kernels and allocate memory


class NativeGpuModel(Model):
    """A model on a GPU.

    If the bound vectors are on the GPU, the model uses them directly. If they are in host memory, it copies parameters
    to the GPU when they have changed, and gradients back; gradients of the last layers are copied while the others are
    computed.

    The step is recorded as CUDA graphs if it is the same every time: all layers are ``static`` and none sums over the
    workers.

    Args:
        split: The training data.
        say: Prints a line for the user.
    """

    accepts_raw = True

    def __init__(
        self, model: Layer, loss: Loss, layout: Layout, gpu: Gpu, split: Split, say: Callable[[str], None]
    ) -> None:
        self._gpu, self._split, self._loss, self._say = gpu, split, loss, say
        gpu.say = say
        self._model, self._inner = model, NativeModel(model, loss, layout, gpu)
        self._stager = BatchStager(gpu, split)
        with gpu.activate():
            self._to_host_stream = Stream()
        self._copies: dict[Any, Array] = {}
        self._on_ready: Callable[[int], None] = lambda child: None
        self._cuts: Mapping[int, int] = {}
        self._inner.watch(lambda child: self._reached(child), {})
        self._recordable = all(_is_static(part) for part in _parts(model, loss))
        self._ran: Counter[int] = Counter()
        self._replays: dict[tuple[int, int], StepGraphs] = {}
        self._replay: StepGraphs | None = None
        self._staged: StagingBuffer | None = None
        # The loss that is being copied to the host: the array on the GPU, its host copy, and the event of the copy.
        self._device_loss: Any = None
        self._host_loss = pinned((1,), np.float64)
        self._loss_copied: Any = None
        self._pending: list[tuple[int, Any]] = []  # children whose gradients are being copied, and the copies' events
        self._synchronous = False

    def bind(self, params: Array, grads: Array) -> None:
        gpu = self._gpu
        self._params, self._grads = params, grads
        self._on_host = not gpu.owns(params)
        if not self._on_host:
            self._inner.bind(params, grads)
            return
        if not self._copies:  # vectors bound first are copied at every step, later ones perhaps once
            gpu.pin(params)
            gpu.pin(grads)
        with gpu.activate():
            self._inner.bind(self._copy("params", params), self._copy("grads", grads))

    def watch(self, on_ready: Callable[[int], None], cuts: Mapping[int, int]) -> None:
        self._on_ready, self._cuts = on_ready, cuts

    def scale_loss(self, scale: Array | None) -> None:
        self._loss.scale = scale

    def memory(self, count: int) -> tuple[Array, Array]:
        return self._stager.memory(count)

    def refresh(self) -> None:
        if self._on_host:
            with self._gpu.activate():
                self._gpu.compute.copy_to_device(self._params, self._copy("params", self._params))

    def forward(self, examples: Array, labels: Array, context: Context) -> Any:
        with self._gpu.activate():
            self._staged = staged = self._stager.copy_to_device(examples, labels, context.position)
            self._replay = self._replay_of(staged, len(examples), context)
            if self._replay is None:
                loss = self._begin(staged, context)
            else:
                self._replay.start()
                loss = self._replay.result
            if self._on_host:
                self._device_loss = loss
                self._to_host_stream.wait_event(self._gpu.compute.record())
                self._to_host_stream.copy_to_host(loss, self._host_loss)
                self._loss_copied = self._to_host_stream.record(self._loss_copied)
            if self._synchronous:
                self._gpu.compute.wait()
            return loss

    def backward(self) -> None:
        assert self._staged is not None
        with self._gpu.activate():
            self._complete_from = len(self._grads)
            if self._replay is None:
                self._inner.backward()
            else:
                self._replay.resume(self._pass_on)
            self._staged.used(self._gpu.compute)
            if self._on_host:
                self._copy_gradients(0)
                self._announce()
            elif self._synchronous:
                self._gpu.compute.wait()

    def loss_value(self, loss: Any) -> float:
        if loss is self._device_loss:
            self._loss_copied.synchronize()
            return float(self._host_loss[0])
        with self._gpu.activate():
            return float(self._gpu.numbers(loss))

    def evaluate(self, examples: Array, labels: Array) -> tuple[float, int | None]:
        with self._gpu.activate():
            found = self._inner.evaluate(self._sent("examples", examples), self._sent("labels", labels))
            loss, correct = found if isinstance(found, tuple) else self._gpu.numbers(found)
            return float(self._gpu.numbers(loss)), None if correct is None else int(correct)

    def trace(self) -> None:
        self._synchronous, self._recordable = True, False

    def memory_use(self) -> dict[str, int]:
        with self._gpu.activate():
            return {
                "activations": sum(layer.buffer_bytes for _, layer in walk(self._model)) + self._loss.buffer_bytes,
                "batches": self._stager.nbytes + sum(copy.nbytes for copy in self._copies.values()),
                "graphs": sum(replay.nbytes for replay in self._replays.values()),
                "cuBLAS": self._gpu.workspace,
                "held": self._gpu.held,
            }

    def activate(self) -> AbstractContextManager[object]:
        return self._gpu.activate()

    def to_host(self, vector: Array) -> Array:
        if self._on_host:
            return vector
        host = np.empty(vector.shape, vector.dtype)
        with self._gpu.activate():
            self._gpu.download(vector, host)
        return host

    def close(self) -> None:
        with self._gpu.activate():
            self._gpu.compute.wait()
        self._replays.clear()
        self._gpu.free()

    # A step.

    def _begin(self, staged: StagingBuffer, context: Context) -> Any:
        """Run the forward pass on a batch that is on the GPU."""
        stored, labels, position = staged.device_arrays
        context = replace(context, position=position, sum_over_workers=self._summing(context.sum_over_workers))
        loss: Any = self._inner.forward(self._examples(stored), labels, context)
        if self._gpu.owns(loss) and loss.dtype == np.float64:
            return loss
        own = self._memory("loss", (1,), np.float64)  # a user-defined loss may return any type
        own[...] = loss
        return own

    def _examples(self, stored: Any) -> Array:
        """Convert and scale a batch from its stored form to the model's input."""
        dtype, scale = self._params.dtype, self._split.scale
        if stored.dtype == dtype and scale == 1:
            found: Array = stored
            return found
        count = len(stored)
        key = "numbers", count
        if key not in self._copies:
            self._copies[key] = self._gpu.copy_of(np.arange(count))
        x = self._memory("x", stored.shape, dtype)
        launch.take(stored.reshape(count, -1), self._copies[key], scale, x.reshape(count, -1))
        return x

    def _reached(self, child: int) -> None:
        """Handle the gradients of child ``child``, which are complete."""
        if child in self._cuts:
            self._pass_on(child)

    def _pass_on(self, child: int) -> None:
        if self._on_host:
            self._copy_gradients(self._cuts[child])
            self._pending.append((child, self._to_host_stream.record()))
        else:
            self._on_ready(child)

    def _copy_gradients(self, start: int) -> None:
        """Start copying ``grads[start:]`` to the host, except what has been copied already."""
        part = slice(start, self._complete_from)
        self._to_host_stream.wait_event(self._gpu.compute.record())
        self._to_host_stream.copy_to_host(self._copy("grads", self._grads)[part], self._grads[part])
        self._complete_from = start

    def _announce(self) -> None:
        """Report gradients as they arrive on the host; return when all have arrived."""
        pending, self._pending = self._pending, []
        for child, copied in pending:
            copied.synchronize()
            self._on_ready(child)
        self._to_host_stream.wait()

    # Recording.

    def _replay_of(self, staged: StagingBuffer, count: int, context: Context) -> StepGraphs | None:
        key = staged.index, count
        found = self._replays.get(key)
        if found is None and self._recordable and context.training:
            self._ran[count] += 1
            if self._ran[count] > _WARM_UPS:
                found = self._record(staged, context)
                if found is not None:
                    self._replays[key] = found
        return found

    def _record(self, staged: StagingBuffer, context: Context) -> StepGraphs | None:
        def step(reached: Callable[[int], None]) -> Array:
            self._inner.watch(reached, {})
            loss = self._begin(staged, context)
            self._inner.backward()
            return loss

        try:
            return StepGraphs(self._gpu, step, self._cuts)
        except Exception as error:
            self._recordable = False
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._say(f"steps cannot be replayed as CUDA graphs and are slower: {reason}")
            return None
        finally:
            self._inner.watch(lambda child: self._reached(child), {})

    # Device memory.

    def _sent(self, name: str, host: Array) -> Array:
        """Copy ``host`` to the GPU and return the copy."""
        copy = self._copy(name, host)
        self._gpu.upload(np.ascontiguousarray(host), copy)
        return copy

    def _copy(self, name: str, host: Array) -> Array:
        """Return GPU memory for arrays of this name, shape and type, initially zero, as gaps must be."""
        key = name, host.shape, host.dtype.char
        if key not in self._copies:
            self._copies[key] = self._gpu.zeros(host.shape, host.dtype)
        return self._copies[key]

    def _memory(self, name: str, shape: Any, dtype: Any) -> Array:
        key = name, shape, np.dtype(dtype).char
        if key not in self._copies:
            self._copies[key] = self._gpu.empty(shape, dtype)
        return self._copies[key]

    def _summing(self, sum_over_workers: SumOverWorkers | None) -> SumOverWorkers | None:
        """Return ``sum_over_workers`` for arrays on the GPU, via the host; steps that call it cannot be recorded."""
        if sum_over_workers is None:
            return None

        def sum_by_host(array: Array) -> None:
            self._recordable = False
            host = np.empty(array.shape, array.dtype)
            self._gpu.download(array, host)
            sum_over_workers(host)
            self._gpu.upload(host, array)

        return sum_by_host


def _parts(model: Layer, loss: Loss) -> list[Layer | Loss]:
    return [*(layer for _, layer in walk(model)), loss]


def _is_static(part: Layer | Loss) -> bool:
    """Whether a part does the same on the GPU at every step: built-in ones do, others declare it (``static``)."""
    own: bool = getattr(part, "static", type(part).__module__.startswith("mpitrain."))
    return own
