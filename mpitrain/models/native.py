"""A model of this package's layers on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.device import Device
from ..core.layout import Array, Layout
from ..nn.container import Sequential
from ..nn.layer import Context, Layer, bind, place
from ..nn.loss import Loss
from .base import Model


class NativeModel(Model):
    """A model that computes directly on the bound vectors, on one device."""

    def __init__(self, model: Layer, loss: Loss, layout: Layout, device: Device) -> None:
        self._model, self._loss, self._layout = model, loss, layout
        place(model, device)
        loss.device = device
        self._gradient: Any = None

    def bind(self, params: Array, grads: Array) -> None:
        bind(self._model, self._layout, params, grads)

    def forward(self, examples: Array, labels: Array, context: Context) -> Any:
        loss, gradient = self._loss(self._outputs(examples, context), labels, context.weight)
        self._gradient = self._scaled(gradient)
        return loss

    def backward(self) -> None:
        self._model.backward(self._gradient)

    def evaluate(self, examples: Array, labels: Array) -> tuple[float, int | None]:
        return self._loss.evaluate(self._outputs(examples, Context()), labels)

    def watch(self, on_ready: Callable[[int], None], cuts: Mapping[int, int]) -> None:
        if isinstance(self._model, Sequential):
            self._model.after_backward = on_ready

    def _outputs(self, examples: Array, context: Context) -> Array:
        outputs = self._model.forward(examples, context)
        return outputs if self._loss.supports_amp else self._model.cast_output(outputs, "outputs")

    def _scaled(self, gradient: Array) -> Array:
        """Return the gradient times the loss scale, unless the loss itself applies it."""
        if self._loss.supports_amp or self._loss.scale is None:
            return gradient
        return self._loss.device.xp.multiply(gradient, self._loss.scale, out=gradient)
