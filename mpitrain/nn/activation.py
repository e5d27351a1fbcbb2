"""Element-wise activations, without parameters."""

from __future__ import annotations

from ..core.layout import Array
from .arguments import within
from .layer import Context, Layer

__all__ = ["GELU", "LeakyReLU", "ReLU", "Sigmoid", "Tanh"]

NO_ACTIVATION = "none", 0.0  #: Kind and slope of the identity, for operations that apply an activation.


class Activation(Layer):
    """An element-wise function.

    Attributes:
        kind: The function's name in operations.
        slope: Slope of a leaky ReLU for negative x.
        is_fused: Whether the layer before or after applies this function. Set by the container.
        in_place: Whether to overwrite ``x``. Set by the container if no other layer reads x.
    """

    supports_amp = True
    kind: str
    slope = 0.0
    is_fused = False
    in_place = False

    @property
    def only_applies_kind(self) -> bool:
        """Whether the layer does nothing but apply ``kind``; subclasses of users may do more."""
        own = type(self)
        return own.forward is Activation.forward and own.backward is Activation.backward

    def forward(self, x: Array, ctx: Context) -> Array:
        if self.is_fused:
            return x
        x = self.cast_input(x, "x")
        y, self._kept = self.ops.activate(x, self.kind, self.slope, self.in_place, self.activations)
        return y

    def backward(self, dy: Array) -> Array:
        if self.is_fused:
            return dy
        dy = self.cast_input(dy, "dy")
        self.ops.activate_backward(self._kept, self.kind, self.slope, dy)
        return dy


class ReLU(Activation):
    """``max(x, 0)``; NaN stays NaN."""

    kind = "relu"


class LeakyReLU(Activation):
    """``x`` if it is positive, else ``slope * x``.

    Args:
        slope: In [0, 1).
        name: Overrides the name that the model assigns.
    """

    kind = "leaky_relu"

    def __init__(self, slope: float = 0.01, name: str | None = None) -> None:
        super().__init__(name)
        self.slope = within(self, "slope", slope, 0, 1)


class GELU(Activation):
    """``x * Phi(x)`` with the normal distribution function Phi, computed by erf instead of the tanh approximation.

    Hendrycks and Gimpel, Gaussian error linear units, arXiv:1606.08415, section 2.
    """

    kind = "gelu"


class Tanh(Activation):
    """Hyperbolic tangent."""

    kind = "tanh"


class Sigmoid(Activation):
    """``1 / (1 + exp(-x))``, accurate in both tails."""

    kind = "sigmoid"
