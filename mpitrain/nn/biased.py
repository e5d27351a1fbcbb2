"""Layers that compute a product plus a bias, fused with the next activation."""

from __future__ import annotations

from ..core.layout import Array
from .activation import NO_ACTIVATION
from .layer import Layer


class Biased(Layer):
    """A layer that adds a bias and applies the activation that follows it.

    Attributes:
        has_bias: Whether the layer adds a bias.
        activation: Kind and slope of the activation that follows, as operations take them; set by the container.
    """

    has_bias: bool
    bias: Array
    bias_grad: Array
    activation: tuple[str, float] = NO_ACTIVATION

    def finish(self, product: Array, bias: Array | None) -> Array:
        """Return the layer's output from its product, which may be overwritten.

        Args:
            product: Shape (rows, columns).
            bias: Shape (columns,); None if the product includes it.
        """
        if bias is None:
            y, self._kept = self.ops.activate(product, *self.activation, True, self.activations)
        else:
            y, self._kept = self.ops.add_bias(product, bias, *self.activation, self.activations)
        return y

    def finish_backward(self, dy: Array, bias_grad: Array | None) -> None:
        """Replace the gradient of ``finish``'s result, C-contiguous, with the product's gradient; set ``bias_grad``."""
        if bias_grad is None:
            self.ops.activate_backward(self._kept, *self.activation, dy)
        else:
            self.ops.add_bias_backward(self._kept, *self.activation, dy, bias_grad)
