"""A PyTorch module on one device: loss and gradient of a batch, in views of the flat vectors.

A ``TorchModel`` owns the module, and consists of parts, each with its own state::

    TorchDevice   (torch_device, torch_gpu)     where torch computes
    TorchParams   (torch_params)                the parameters as views of the vectors: ``tensors``
      .copies     (pytorch.bfloat16)            those parameters that are bfloat16 copies instead
      .gradients  (pytorch.gradients)           ``param.grad``, and its way to the flat gradient
    Buffers       (pytorch.buffers)             the buffers, as state in the vectors
    TorchPasses   (torch_passes)                forward and backward passes with these parts

For a script's own loop, ``SteppedTorchModel`` calls methods of the same names of these parts, and of a ``ParamsGuard``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from ..core.extra_state import ExtraState
from ..core.host_memory import keep_freed_memory
from ..core.layout import Array
from ..core.ranges import OnReady
from ..core.training_state import TrainingState
from ..data.batch import Batch, CollatedBatch, IndexBatch
from ..data.checks import check_classes
from ..data.split import Split
from ..errors import JobError
from ..nn.layer import SumOverWorkers
from ..plan.metric import Totals
from ..plan.plan import Plan
from ..pytorch.batches import DatasetOnDevice, arguments_of, to_tensor
from ..pytorch.bfloat16 import to_array, to_bfloat16
from ..pytorch.buffers import Buffers
from ..pytorch.network import TorchNetwork
from ..pytorch.outputs import are_scores, correct_predictions, on_host
from ..pytorch.sync_batch_norm import synchronize
from .base import Model, OnOutputs
from .torch_device import TorchDevice
from .torch_params import ParamsGuard, TorchParams
from .torch_passes import TorchPasses


class TorchModel(Model):
    """A PyTorch module whose parameters and gradients are views of the bound vectors, on one device.

    The loss is a mean over the batch, as in PyTorch, weighted by the batch's share of the step's examples.

    Args:
        split: The training data.
        state: Its ``frozen`` is set to the parameters that do not require a gradient.
        sum_over_workers: Sums a small array over all workers, in place; None if there is only one worker.
        announces: Whether buckets are announced during the backward pass; this takes a hook for each parameter.
    """

    def __init__(
        self,
        network: TorchNetwork,
        plan: Plan,
        device: TorchDevice,
        split: Split,
        state: TrainingState,
        sum_over_workers: SumOverWorkers | None = None,
        announces: bool = True,
    ) -> None:
        keep_freed_memory()
        self._network, self._plan, self._device, self._split = network, plan, device, split
        self._module, self._criterion, self._inputs_of = network.model, network.criterion, network.inputs_of
        self._takes_labels, self._takes_bfloat16 = network.loss is None, network.is_bfloat16
        self._seed, self._dtype = plan.config.training.seed, plan.dtype
        if device.torch_device.type != "cpu":
            with device.activate():
                network.model.to(device.torch_device)
        self._params = TorchParams(network.model, plan, device, state, announces)
        self._buffers = Buffers(network.model, keeps_first=plan.config.virtual_workers is not None)
        self._passes = TorchPasses(network.model, plan, device, self._params, self._buffers)
        self._exact, self._sum_over_workers = plan.config.training.exact_mean, sum_over_workers
        self._factor: float | None = None  # of the sum of the losses of a micro-batch, if the mean is exact
        if sum_over_workers is not None:
            synchronize(network.model, device.summing(sum_over_workers))

    def bind(self, params: Array, grads: Array) -> None:
        with self._device.activate():
            values, gradients = self._params.views(params), self._params.views(grads)
            self._params.bind(params, values, gradients)
            self._buffers.bind(values, gradients)

    def load_params(self) -> None:
        with self._device.activate():
            self._params.copies.load()
        self._params.note_frozen()

    def freeze(self, flags: Array) -> None:
        for param, flag in zip(self._params.tensors, flags, strict=False):
            param.requires_grad = not flag

    def begin_step(self, batch: Batch) -> None:
        self._buffers.begin_step()
        if self._exact:
            with self._device.activate():
                if isinstance(batch, IndexBatch):
                    labels: Any = self._dataset.labels_of(self._device.upload_indices(batch.examples))
                elif isinstance(batch, CollatedBatch):
                    labels = self._inputs_of(batch, self._dtype).labels
                else:  # the examples are not converted, too
                    labels = to_tensor(batch.labels, self._dtype)
                count = np.array([self._criterion.count(labels, batch.count)], np.float64)
            if self._sum_over_workers is not None:
                self._sum_over_workers(count)
            self._factor = 1 / float(count[0]) if count[0] else 0.0

    def compute_loss(self, batch: Batch) -> Any:
        with self._device.exclusive():
            if isinstance(batch, IndexBatch):
                inputs = self._dataset.inputs_of(self._device.upload_indices(batch.examples), self._takes_labels)
            else:
                inputs = self._inputs_of(batch, self._dtype, self._device.torch_device)
            self._passes.begin_forward(batch.position)
            with self._passes.autocast():
                outputs = self._module(*inputs.args, **inputs.kwargs)
                loss = self._loss_of(outputs, inputs.labels, batch, self._split)
            return self._passes.end_forward(loss, batch.count, self._factor)

    def compute_grads(self, on_ready: OnReady) -> None:
        self._passes.backward(on_ready)

    def add_loss(self, total: Any, loss: Any) -> Any:
        return self._device.add_loss(total, loss)

    @cached_property
    def stepped(self) -> SteppedTorchModel:
        return SteppedTorchModel(self._device, self._params, self._passes, ParamsGuard(self._params, self._plan))

    # Inference.

    def evaluate(self, batch: Batch, on_outputs: OnOutputs | None = None) -> Totals:
        with self._passes.inference():
            inputs = self._inputs_of(batch, self._dtype, self._device.torch_device)
            outputs = self._module(*inputs.args, **inputs.kwargs)
            if on_outputs is not None:
                on_outputs(on_host(outputs), on_host(inputs.labels))
            loss, criterion, labels = self._loss_of(outputs, inputs.labels, batch), self._criterion, inputs.labels
            correct = correct_predictions(outputs, labels, criterion.ignore_index)
            return Totals(float(loss), criterion.count(labels, batch.count), *correct)

    def predict(self, batch: Batch) -> Array:
        with self._passes.inference():
            args, kwargs = arguments_of(batch, self._dtype, self._device.torch_device)
            if self._takes_bfloat16:
                args, kwargs = to_bfloat16(args), to_bfloat16(kwargs)
            outputs = self._module(*args, **kwargs)
        if not isinstance(outputs, Tensor):
            kind = type(outputs).__name__
            raise JobError(f"the model returns {kind}, must be one tensor; load it with mpitrain.load(RUN) and call it")
        return to_array(outputs).copy()

    # State and memory.

    def extra_state(self) -> ExtraState:
        return self._buffers.extra_state()

    def load_extra_state(self, state: ExtraState) -> None:
        self._buffers.load_extra_state(state)

    def has_room(self, examples: Array, labels: Array) -> bool:
        return DatasetOnDevice.supports(examples, labels) and self._device.has_room(examples, labels)

    def cache_dataset(self, examples: Array, labels: Array) -> None:
        scale = None if self._network.takes_integers(self._split) else self._split.scale
        with self._device.activate():
            self._dataset = DatasetOnDevice(
                examples, labels, scale, self._dtype, self._takes_bfloat16, self._device.torch_device
            )

    def memory_use(self) -> dict[str, int]:
        return self._device.memory_use()

    def activate(self) -> AbstractContextManager[object]:
        return self._device.activate()

    def to_host(self, vector: Array) -> Array:
        return self._device.to_host(vector)

    def close(self) -> None:
        """Let the module keep its values in its own memory: the vectors' memory is freed after training."""
        with self._device.activate():
            self._buffers.load()
            self._params.copies.load()
            for param in self._params.tensors:
                param.data, param.grad = param.data.clone(), None
        self._device.synchronize()

    def _loss_of(self, outputs: Any, labels: Any, batch: Batch, split: Split | None = None) -> Tensor:
        """Return the mean loss of outputs; in validation and if the mean is exact, the sum (``Criterion.total``).

        Args:
            split: The training data, of whose endless stream the batch is a part; None for validation.

        Raises:
            DataError: A label is not a class.
            JobError: Outputs and labels differ in shape; see ``Criterion``.
        """
        criterion = self._criterion
        criterion.note_broadcast(outputs, labels)
        try:
            if split is None or self._exact:
                return criterion.total(outputs, labels, batch.count)
            return criterion(outputs, labels)
        except IndexError:
            if are_scores(outputs, labels):
                values = labels.detach().cpu().numpy()
                source, first = "validation", np.arange(batch.position, batch.position + batch.count)
                if split is not None:
                    source, first = split.source, split.order(batch.position, batch.count, self._seed)
                values = np.where(values == criterion.ignore_index, 0, values)
                check_classes(source, values, first, outputs.shape[1])
            raise


class SteppedTorchModel:
    """Implements ``SteppedModel`` with the parts of a ``TorchModel``."""

    def __init__(self, device: TorchDevice, params: TorchParams, passes: TorchPasses, guard: ParamsGuard) -> None:
        self._device, self._params, self._passes, self._guard = device, params, passes, guard
        self._gradients, self._copies = params.gradients, params.copies
        self.copies_params = self.copies_grads = bool(params.copies.names)

    def use_device(self) -> None:
        self._device.use_device()

    def add_loss(self, total: Any, loss: Any) -> Any:
        return self._device.add_loss(total, loss)

    # Passes.

    def begin_forward(self, position: int, pending: bool = False) -> None:
        with self._device.activate():
            self._passes.begin_forward(position, pending)

    def seed(self, position: int) -> None:
        self._passes.seed(position)

    def end_forward(self, loss: Tensor, count: int, factor: float = 1.0) -> Any:
        with self._device.activate():
            share = self._passes.end_forward(loss, count)
            if factor != 1:
                self._passes.loss = self._passes.loss * factor
            return share

    def backward(
        self, on_ready: OnReady, kept: Collection[str] | None = (), computed: Collection[str] | None = None
    ) -> None:
        self._passes.backward(on_ready, kept, computed)

    def mark_updated(self, names: Collection[str] | None) -> None:
        self._passes.mark_updated(names)

    def inference(self) -> AbstractContextManager[None]:
        return self._passes.inference()

    # Gradients.

    def show_grads_in(self, shown: Array, fetch: Callable[[], None]) -> None:
        tensors = self._params.views(shown)
        self._gradients.show_grads_in([tensors[name] for name in self._params.names], fetch)

    def collect_grads(self, fetch: Callable[[], None]) -> None:
        self._gradients.collect_grads(fetch)

    def load_grads(self) -> None:
        """Do nothing: the bound gradient is on the device."""

    def hide_grads(self) -> None:
        self._gradients.hide_grads()

    def show_grads(self) -> None:
        self._gradients.show_grads()

    # Parameters.

    def note_frozen(self) -> None:
        self._params.note_frozen()

    def show_params(self) -> None:
        with self._device.activate():
            self._passes.end_step()
            self._copies.load()

    def store_params(self) -> None:
        self._copies.store_params()

    def record_params(self) -> None:
        self._guard.record_params()

    def check_params(self) -> None:
        self._guard.check_params()

    def check_data_pointers(self) -> None:
        self._guard.check_data_pointers()
