"""The model on a GPU: loss and gradient of a batch, without the host waiting for either."""

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

_WARM_UPS = 2  # steps before one is recorded: kernels are compiled then, and memory is taken


class NativeGpuModel(Model):
    """A model on a GPU.

    Vectors that it is bound to may lie there, too. Where they are this process's, parameters go there when they have
    changed, and gradients come back, those of the last layers beside the computation of the others.

    The step is recorded as CUDA graphs where it is the same every time: where all layers are ``static`` and none sums
    over the workers.

    Args:
        split: What is trained with.
        say: Takes a line for the user.
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
            self._leaving = Stream()
        self._copies: dict[Any, Array] = {}
        self._on_ready: Callable[[int], None] = lambda child: None
        self._cuts: Mapping[int, int] = {}
        self._inner.watch(lambda child: self._reached(child), {})
        self._recordable = all(_is_static(part) for part in _parts(model, loss))
        self._ran: Counter[int] = Counter()
        self._replays: dict[tuple[int, int], StepGraphs] = {}
        self._replay: StepGraphs | None = None
        self._staged: StagingBuffer | None = None
        # Of a loss that is on its way here: the array there, the one here, and when it is there.
        self._loss_there: Any = None
        self._loss_here = pinned((1,), np.float64)
        self._loss_came: Any = None
        self._left: list[tuple[int, Any]] = []  # children whose gradients are on their way here, and when they are
        self._waits = False

    def bind(self, params: Array, grads: Array) -> None:
        gpu = self._gpu
        self._params, self._grads = params, grads
        self._on_host = not gpu.owns(params)
        if not self._on_host:
            self._inner.bind(params, grads)
            return
        if not self._copies:  # these will come and go at every step, others perhaps once
            gpu.pin(params)
            gpu.pin(grads)
        with gpu.activate():
            self._inner.bind(self._copy("params", params), self._copy("grads", grads))

    def watch(self, told: Callable[[int], None], cuts: Mapping[int, int]) -> None:
        self._on_ready, self._cuts = told, cuts

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
                self._loss_there = loss
                self._leaving.wait_event(self._gpu.compute.record())
                self._leaving.copy_to_host(loss, self._loss_here)
                self._loss_came = self._leaving.record(self._loss_came)
            if self._waits:
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
                self._leave(0)
                self._announce()
            elif self._waits:
                self._gpu.compute.wait()

    def loss_value(self, loss: Any) -> float:
        if loss is self._loss_there:
            self._loss_came.synchronize()
            return float(self._loss_here[0])
        with self._gpu.activate():
            return float(self._gpu.numbers(loss))

    def evaluate(self, examples: Array, labels: Array) -> tuple[float, int | None]:
        with self._gpu.activate():
            found = self._inner.evaluate(self._sent("examples", examples), self._sent("labels", labels))
            loss, correct = found if isinstance(found, tuple) else self._gpu.numbers(found)
            return float(self._gpu.numbers(loss)), None if correct is None else int(correct)

    def trace(self) -> None:
        self._waits, self._recordable = True, False

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
        """The forward pass, of a batch that is there."""
        stored, labels, position = staged.device_arrays
        context = replace(context, position=position, sum_over_workers=self._summing(context.sum_over_workers))
        loss: Any = self._inner.forward(self._examples(stored), labels, context)
        if self._gpu.owns(loss) and loss.dtype == np.float64:
            return loss
        own = self._memory("loss", (1,), np.float64)  # of a loss that is not ours, and may be any number
        own[...] = loss
        return own

    def _examples(self, stored: Any) -> Array:
        """The examples of a batch as the model takes them, from how they are stored."""
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
        """Child ``child`` of the model has its gradients."""
        if child in self._cuts:
            self._pass_on(child)

    def _pass_on(self, child: int) -> None:
        if self._on_host:
            self._leave(self._cuts[child])
            self._left.append((child, self._leaving.record()))
        else:
            self._on_ready(child)

    def _leave(self, start: int) -> None:
        """Have ``grads[start:]`` copied to this process, as far as it has not been yet."""
        part = slice(start, self._complete_from)
        self._leaving.wait_event(self._gpu.compute.record())
        self._leaving.copy_to_host(self._copy("grads", self._grads)[part], self._grads[part])
        self._complete_from = start

    def _announce(self) -> None:
        """Say which gradients are here, as they come; return when all are."""
        left, self._left = self._left, []
        for child, came in left:
            came.synchronize()
            self._on_ready(child)
        self._leaving.wait()

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
            told = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._say(f"steps are not replayed as CUDA graphs, which is slower: {told}")
            return None
        finally:
            self._inner.watch(lambda child: self._reached(child), {})

    # Memory there.

    def _sent(self, name: str, host: Array) -> Array:
        """What ``host`` holds now, on the GPU."""
        there = self._copy(name, host)
        self._gpu.upload(np.ascontiguousarray(host), there)
        return there

    def _copy(self, name: str, host: Array) -> Array:
        """Memory there for arrays of this name, shape and type; zeros at first, as between gradients."""
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
        """``sum_over_workers`` for arrays on the GPU, by this process: a step that takes it cannot be recorded."""
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
    """Whether a part asks the same of the GPU at every step: ours do; of others only they know."""
    own: bool = getattr(part, "static", type(part).__module__.startswith("mpitrain."))
    return own
