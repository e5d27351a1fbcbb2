"""A model of this package's layers on a GPU, computed asynchronously to the host."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..core.layout import Array
from ..core.ranges import OnReady
from ..core.training_state import TrainingState
from ..data.batch import Batch, IndexBatch
from ..data.split import Split
from ..gpu import ops
from ..gpu.device import Gpu
from ..gpu.graphs import StepGraphs
from ..gpu.staging import BatchStager, StagingBuffer
from ..nn.container import input_dtype
from ..nn.layer import Layer, SumOverWorkers, walk
from ..nn.loss import Loss
from ..plan.metric import Totals
from ..plan.plan import Plan
from .base import Model, OnOutputs
from .layers import LayerModel

_log = logging.getLogger(__name__)
_WARM_UPS = 2  # steps before recording, which compile kernels and allocate memory


class LayerGpuModel(Model):
    """Layers that compute directly on the bound vectors, on a GPU. It announces gradients that complete a bucket.

    The step is recorded as CUDA graphs if it is the same every time: all layers are ``static`` and none sums over the
    workers.

    Args:
        split: The training data.
        sum_over_workers: See ``nn.Context``.
    """

    accepts_raw = True

    def __init__(
        self,
        model: Layer,
        loss: Loss,
        plan: Plan,
        gpu: Gpu,
        split: Split,
        state: TrainingState,
        sum_over_workers: SumOverWorkers | None = None,
    ) -> None:
        gpu.take_memory()
        self._gpu, self._split, self._loss, self._dtype = gpu, split, loss, plan.dtype
        self._inner = LayerModel(model, loss, plan, gpu, state, self._summing(sum_over_workers))
        self._model, self._borders = model, {start: layer for layer, start in plan.layer_borders.items()}
        self._stager = BatchStager(gpu, [(split.shape, split.dtype), (split.label_shape, split.label_dtype)])
        self._index_stager = BatchStager(gpu, [((), np.int64)])
        self._cached: tuple[Array, Array] | None = None  # training examples and labels, if they are on the GPU
        self._buffers: dict[Any, Array] = {}
        self._on_ready: OnReady = lambda start: None
        self._traced = plan.config.output.trace  # wait for the device, so that durations can be measured
        self._recordable = not self._traced and all(_is_static(part) for part in _parts(model, loss))
        self._ran: Counter[tuple[int, int]] = Counter()
        self._replays: dict[tuple[int, int, int], StepGraphs] = {}
        self._replay: StepGraphs | None = None
        self._staged: StagingBuffer | None = None

    def bind(self, params: Array, grads: Array) -> None:
        with self._gpu.activate():
            self._inner.bind(params, grads)

    def compute_loss(self, batch: Batch) -> Any:
        with self._gpu.activate():
            if isinstance(batch, IndexBatch):
                staged = self._index_stager.copy_to_device([batch.examples], batch.position)
            else:
                staged = self._stager.copy_to_device([batch.examples, batch.labels], batch.position)
            self._staged = staged
            self._replay = self._replay_of(staged, batch.count)
            if self._replay is None:
                loss = self._begin(staged)
            else:
                self._replay.start()
                loss = self._replay.result
            self._wait_if_traced()
            return loss

    def compute_grads(self, on_ready: OnReady) -> None:
        assert self._staged is not None
        self._on_ready = on_ready
        with self._gpu.activate():
            if self._replay is None:
                self._inner.compute_grads(self._announce)
            else:
                self._replay.resume(self._announce)
            self._staged.used(self._gpu.compute)
            self._wait_if_traced()

    def evaluate(self, batch: Batch, on_outputs: OnOutputs | None = None) -> Totals:
        with self._gpu.activate():
            uploaded = Batch(self._uploaded("examples", batch.examples), self._uploaded("labels", batch.labels), 0)
            result = self._inner.evaluate_loss(uploaded, None if on_outputs is None else self._on_host(on_outputs))
            loss, correct = result if isinstance(result, tuple) else self._gpu.to_python(result)
            correct = None if correct is None else int(correct)
            return Totals.of_examples(float(self._gpu.to_python(loss)), correct, batch.count)

    def _on_host(self, on_outputs: OnOutputs) -> OnOutputs:
        """Return a function that copies outputs and labels to the host, and passes them on."""
        return lambda outputs, labels: on_outputs(self._gpu.to_host(outputs), self._gpu.to_host(labels))

    def add_loss(self, total: Any, loss: Any) -> Any:
        return total + loss  # a new array: the device's result is valid only until the next micro-batch

    def memory(self, count: int) -> tuple[Array, Array] | None:
        examples, labels = self._stager.memory(count)
        return examples, labels

    def has_room(self, examples: Array, labels: Array) -> bool:
        return self._gpu.has_room(examples, labels)

    def cache_dataset(self, examples: Array, labels: Array) -> None:
        with self._gpu.activate():
            self._cached = self._gpu.copy_of(examples), self._gpu.copy_of(labels)

    def memory_use(self) -> dict[str, int]:
        with self._gpu.activate():
            return {
                "activations": sum(layer.buffer_bytes for _, layer in walk(self._model)) + self._loss.buffer_bytes,
                "data": sum(array.nbytes for array in self._cached or ()),
                "batches": self._stager.nbytes
                + self._index_stager.nbytes
                + sum(buffer.nbytes for buffer in self._buffers.values()),
                "graphs": sum(replay.nbytes for replay in self._replays.values()),
                "cuBLAS": self._gpu.workspace,
                "held": self._gpu.held,
            }

    def activate(self) -> AbstractContextManager[object]:
        return self._gpu.activate()

    def to_host(self, vector: Array) -> Array:
        return self._gpu.to_host(vector)

    def close(self) -> None:
        with self._gpu.activate():
            self._gpu.compute.wait()
        self._replays.clear()
        self._cached = None
        self._gpu.free()

    # A step.

    def _begin(self, staged: StagingBuffer) -> Any:
        """Run the forward pass on a batch that is on the GPU."""
        position: Any = staged.device_position
        loss: Any = self._inner.compute_loss(Batch(*self._inputs(staged.device_arrays), position))
        if self._gpu.owns(loss) and loss.dtype == np.float64:
            return loss
        own = self._memory("loss", (1,), np.float64)  # a user-defined loss may return any type
        own[...] = loss
        return own

    def _inputs(self, arrays: list[Array]) -> tuple[Array, Array]:
        """Return the model's input and the labels, given a staged batch: examples and labels, or their indices."""
        if len(arrays) == 2:
            stored, labels = arrays
            return self._examples(stored, None), labels
        assert self._cached is not None
        (indices,), (stored, labels) = arrays, self._cached
        return self._examples(stored, indices), self._rows("labels", labels, indices)

    def _examples(self, stored: Array, indices: Array | None) -> Array:
        """Return examples, all or by index, converted and scaled to the model's input unless it takes integers."""
        dtype, scale = self._dtype, self._split.scale
        is_kept = self._split.has_integers and self._model.integer_inputs
        if is_kept or (stored.dtype == dtype and scale == 1):
            return stored if indices is None else self._rows("x", stored, indices)
        if indices is None:
            key = "indices", len(stored)
            if key not in self._buffers:
                self._buffers[key] = self._gpu.copy_of(np.arange(len(stored)))
            indices = self._buffers[key]
        x = self._memory("x", (len(indices), *stored.shape[1:]), input_dtype(self._model))
        ops.take(stored.reshape(len(stored), -1), indices, scale, x.reshape(len(x), -1))
        return x

    def _rows(self, name: str, stored: Array, indices: Array) -> Array:
        """Return ``stored[indices]`` in the buffer ``name``."""
        rows = self._memory(name, (len(indices), *stored.shape[1:]), stored.dtype)
        self._gpu.xp.take(stored, indices, axis=0, out=rows)
        return rows

    def _announce(self, start: int) -> None:
        """Report that ``grads[start:]`` is final, if it completes a bucket."""
        if start in self._borders:
            self._on_ready(start)

    def _wait_if_traced(self) -> None:
        if self._traced:
            self._gpu.compute.wait()

    # Recording.

    def _replay_of(self, staged: StagingBuffer, count: int) -> StepGraphs | None:
        kind = count, len(staged.arrays)  # examples and labels, or indices
        key = staged.index, *kind
        replay = self._replays.get(key)
        if replay is None and self._recordable:
            self._ran[kind] += 1
            if self._ran[kind] > _WARM_UPS:
                replay = self._record(staged)
                if replay is not None:
                    self._replays[key] = replay
        return replay

    def _record(self, staged: StagingBuffer) -> StepGraphs | None:
        def step(reached: Callable[[int], None]) -> Array:
            loss = self._begin(staged)
            self._inner.compute_grads(reached)
            return loss

        try:
            return StepGraphs(self._gpu, step, self._borders)
        except Exception as error:
            self._recordable = False
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            _log.info("steps cannot be replayed as CUDA graphs and are slower: %s", reason)
            return None

    # Device memory.

    def _uploaded(self, name: str, host: Array) -> Array:
        """Return a copy of ``host`` on the GPU, valid until the next copy of this name."""
        copy = self._memory(name, host.shape, host.dtype)
        self._gpu.upload(np.ascontiguousarray(host), copy)
        return copy

    def _memory(self, name: str, shape: Any, dtype: Any) -> Array:
        """Return GPU memory for arrays of this name, shape and type."""
        key = name, shape, np.dtype(dtype).char
        if key not in self._buffers:
            self._buffers[key] = self._gpu.empty(shape, dtype)
        return self._buffers[key]

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
    """Return whether a part makes the same GPU calls at every step: built-in parts do, others declare ``static``."""
    own: bool = getattr(part, "static", type(part).__module__.startswith("mpitrain."))
    return own
