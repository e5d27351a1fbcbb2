"""Layers that compute a product plus a bias, optionally fused with the next activation."""

from __future__ import annotations

from ..core.layout import Array
from .activation import Activation
from .layer import Layer


class Biased(Layer):
    """A layer that adds a bias and, if the device has a fused kernel, applies the activation that follows it.

    Attributes:
        has_bias: Whether the layer adds a bias.
        activation: The next layer, if it is an activation; set by the container.
    """

    has_bias: bool
    bias: Array
    bias_grad: Array
    activation: Activation | None = None

    def add_bias(self, product: Array) -> Array:
        """Return the layer's output from its product, shape (rows, len(bias)), which may be overwritten."""
        kernels = self.device.kernels
        if kernels is None:
            return self.device.xp.add(product, self.bias, out=product)
        kind, slope = self._after
        y = self.activations("activated", product.shape) if kind == "gelu" else product
        kernels.add_bias(product, self.bias, kind, slope, y)
        self._kept = None if kind == "none" else product
        return y

    def add_bias_backward(self, dy: Array) -> Array:
        """Return the gradient of the product, given the gradient of ``add_bias``'s result; set the bias's gradient.

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
        """Kind and slope of the activation, as kernels take them."""
        return ("none", 0.0) if self.activation is None else (self.activation.kind, self.activation.slope)
