"""A model of this package's layers on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.device import Device
from ..core.layout import Array
from ..core.ranges import OnReady
from ..core.training_state import TrainingState
from ..data.batch import Batch
from ..nn.container import Sequential
from ..nn.layer import Context, Layer, SumOverWorkers, bind, to_device
from ..nn.loss import Loss
from ..plan.metric import Totals
from ..plan.plan import Plan
from .base import Model, OnOutputs


class LayerModel(Model):
    """Layers that compute directly on the bound vectors, on one device.

    Args:
        sum_over_workers: See ``nn.Context``.
    """

    def __init__(
        self,
        model: Layer,
        loss: Loss,
        plan: Plan,
        device: Device,
        state: TrainingState,
        sum_over_workers: SumOverWorkers | None = None,
    ) -> None:
        self._model, self._loss, self._layout = model, loss, plan.layout
        self.context = Context(
            True, seed=plan.config.training.seed, weight=plan.weight, sum_over_workers=sum_over_workers
        )
        self._starts = plan.layer_starts
        to_device(model, device)
        loss.device, loss.scale = device, state.loss_scale
        self._gradient: Any = None
        self._on_ready: OnReady = lambda start: None
        if model.announces_children:
            model.after_backward = self._layer_done
        # A user's own container, or a subclass with another ``forward``, may not call ``before_forward``. Layers with
        # state, such as running statistics, also read the end of the vector.
        calls_back = isinstance(model, Sequential) and type(model).forward is Sequential.forward
        self.can_await_params = calls_back and plan.layout.size == plan.layout.n_trained

    def bind(self, params: Array, grads: Array) -> None:
        bind(self._model, self._layout, params, grads)

    def await_params_by(self, wait: Callable[[int], None]) -> None:
        stops = [*self._starts[1:], self._layout.n_trained]
        self._model.before_forward = lambda child: wait(stops[child])

    def compute_loss(self, batch: Batch) -> Any:
        self.context.position = batch.position
        loss, gradient = self._loss(self._outputs(batch.examples, self.context), batch.labels, self.context.weight)
        self._gradient = self._scaled(gradient)
        return loss

    def compute_grads(self, on_ready: OnReady) -> None:
        self._on_ready, self._reported = on_ready, self._layout.size
        self._model.backward(self._gradient)

    def evaluate(self, batch: Batch, on_outputs: OnOutputs | None = None) -> Totals:
        loss, correct = self.evaluate_loss(batch, on_outputs)
        return Totals.of_examples(loss, correct, batch.count)

    def evaluate_loss(self, batch: Batch, on_outputs: OnOutputs | None = None) -> Any:
        """Return the result of ``nn.Loss.evaluate``; on a GPU it may be an array."""
        outputs = self._outputs(batch.examples, Context())
        if on_outputs is not None:
            on_outputs(self._model.cast_output(outputs, "metrics").copy(), batch.labels.copy())
        return self._loss.evaluate(outputs, batch.labels)

    def predict(self, batch: Batch) -> Array:
        return self._outputs(batch.examples, Context()).copy()

    def _layer_done(self, child: int) -> None:
        start = self._starts[child]
        if 0 < start < self._reported:  # layers without parameters have the start of a later layer
            self._reported = start
            self._on_ready(start)

    def _outputs(self, examples: Array, context: Context) -> Array:
        outputs = self._model.forward(examples, context)
        return outputs if self._loss.supports_amp else self._model.cast_output(outputs, "outputs")

    def _scaled(self, gradient: Array) -> Array:
        """Return the gradient times the loss scale, unless the loss itself applies it."""
        if self._loss.supports_amp or self._loss.scale is None:
            return gradient
        return self._loss.device.xp.multiply(gradient, self._loss.scale, out=gradient)
