"""Layers that compute a product plus a bias, fused with the next activation."""

from __future__ import annotations

from ..core.layout import Array
from .activation import Activation
from .layer import Layer


class Biased(Layer):
    """A layer that adds a bias and applies the activation that follows it.

    Attributes:
        has_bias: Whether the layer adds a bias.
        activation: The next layer, if it is an activation; set by the container.
    """

    has_bias: bool
    bias: Array
    bias_grad: Array
    activation: Activation | None = None

    def finish(self, product: Array, bias: Array | None) -> Array:
        """Return the layer's output from its product, which may be overwritten.

        Args:
            product: Shape (rows, columns).
            bias: Shape (columns,); None if the product includes it.
        """
        if bias is None:
            y, self._kept = self.ops.activate(product, *self._after, True, self.activations)
        else:
            y, self._kept = self.ops.add_bias(product, bias, *self._after, self.activations)
        return y

    def finish_backward(self, dy: Array, bias_grad: Array | None) -> None:
        """Replace the gradient of ``finish``'s result, C-contiguous, with that of the product; set the bias's."""
        if bias_grad is None:
            self.ops.activate_backward(self._kept, *self._after, dy)
        else:
            self.ops.add_bias_backward(self._kept, *self._after, dy, bias_grad)

    @property
    def _after(self) -> tuple[str, float]:
        """Kind and slope of the activation, as operations take them."""
        return ("none", 0.0) if self.activation is None else (self.activation.kind, self.activation.slope)
