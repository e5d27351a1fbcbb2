"""Layers whose outputs are a product and a bias, and what is done to those in one pass."""

from __future__ import annotations

from ..core.layout import Array
from .activation import Activation
from .layer import Layer


class Biased(Layer):
    """A layer that adds a bias, and does the activation after it too where the device has a kernel for both.

    Attributes:
        has_bias: Whether it adds one.
        activation: The layer that comes next, if it is an activation; a container sets it.
    """

    has_bias: bool
    bias: Array
    bias_grad: Array
    activation: Activation | None = None

    def add_bias(self, product: Array) -> Array:
        """What the layer returns, made of its product, shape (rows, len(bias)), which may be overwritten."""
        kernels = self.device.kernels
        if kernels is None:
            return self.device.xp.add(product, self.bias, out=product)
        kind, slope = self._after
        y = self.activations("activated", product.shape) if kind == "gelu" else product
        kernels.add_bias(product, self.bias, kind, slope, y)
        self._kept = None if kind == "none" else product
        return y

    def add_bias_backward(self, dy: Array) -> Array:
        """The gradient of the product, from that of what ``add_bias`` returned; assigns that of the bias.

        Args:
            dy: C-contiguous; may be overwritten.
        """
        kernels = self.device.kernels
        if kernels is None:
            self.device.xp.add.reduce(dy, axis=0, out=self.bias_grad)
            return dy
        kernels.add_bias_backward(self._kept, *self._after, dy, self.bias_grad)
        return dy

    @property
    def _after(self) -> tuple[str, float]:
        """The activation as a kernel is told of it."""
        return ("none", 0.0) if self.activation is None else (self.activation.kind, self.activation.slope)
