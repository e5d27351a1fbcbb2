"""Layers with one matrix: Dense multiplies by it, Embedding looks up its rows."""

from __future__ import annotations

from ..core.layout import Array, Shape
from ..errors import JobError
from .arguments import positive, wrong_shape
from .biased import Biased
from .init import glorot_uniform, truncated_normal, zeros
from .layer import Context, Initializer, Layer


class Dense(Biased):
    """``y = x @ weight + bias`` for examples of shape (in_features,).

    Args:
        in_features: Length of an example.
        out_features: Length of an output.
        bias: Whether to add a bias.
        weight_init: Initial values of ``weight``, shape (in_features, out_features).
        name: Overrides the name that the model assigns.
    """

    supports_amp = True
    weight: Array
    weight_grad: Array

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        weight_init: Initializer = glorot_uniform,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.in_features = positive(self, "in_features", in_features)
        self.out_features = positive(self, "out_features", out_features)
        self.has_bias = bias
        self.weight_init = weight_init

    def build(self, shape: Shape) -> Shape:
        if shape != (self.in_features,):
            hint = f"set in_features={shape[0]}" if len(shape) == 1 else "insert Flatten() before it"
            raise wrong_shape(self, (self.in_features,), shape, hint)
        self.declare("weight", (self.in_features, self.out_features), self.weight_init)
        if self.has_bias:
            self.declare("bias", (self.out_features,), zeros)
        return (self.out_features,)

    def forward(self, x: Array, ctx: Context) -> Array:
        self._x = x = self.cast_input(x, "x")
        self._weight = self.cast_param(self.weight, "weight")
        y = self.activations("y", (len(x), self.out_features))
        self.device.matmul(x, self._weight, out=y)
        return self.finish(y, self.bias) if self.has_bias else y

    def backward(self, dy: Array) -> Array | None:
        dy = self.cast_input(dy, "dy")
        if self.has_bias:
            self.finish_backward(dy, self.bias_grad)
        self.device.matmul(self._x.T, dy, out=self.weight_grad)
        if not self.needs_dx:
            return None
        return self.device.matmul(dy, self._weight.T, out=self.activations("dx", self._x.shape))


class Embedding(Layer):
    """Looks up a row of ``weight`` for each integer: shape ``(*shape,)`` becomes ``(*shape, features)``.

    An integer outside [0, vocabulary) gives NaN, which makes the loss NaN.

    Args:
        vocabulary: Number of rows.
        features: Length of a row.
        weight_init: Initial values of ``weight``, shape (vocabulary, features).
        name: Overrides the name that the model assigns.
    """

    weight: Array
    weight_grad: Array
    supports_amp = True
    integer_inputs = True
    needs_dx = False  # integers have no gradient

    def __init__(
        self, vocabulary: int, features: int, weight_init: Initializer = truncated_normal(0.05), name: str | None = None
    ) -> None:
        super().__init__(name)
        self.vocabulary = positive(self, "vocabulary", vocabulary)
        self.features = positive(self, "features", features)
        self.weight_init = weight_init

    def build(self, shape: Shape) -> Shape:
        if self.needs_dx:
            raise JobError("Embedding requires integer input; move it before all layers with parameters")
        self.declare("weight", (self.vocabulary, self.features), self.weight_init)
        return (*shape, self.features)

    def forward(self, x: Array, ctx: Context) -> Array:
        self._x = x
        y = self.activations("y", (*x.shape, self.features))
        self.ops.take_rows(self.weight, x.reshape(-1), y.reshape(-1, self.features))
        return y

    def backward(self, dy: Array) -> None:
        dy = self.cast_input(dy, "dy")
        self.ops.add_rows(dy.reshape(-1, self.features), self._x.reshape(-1), self.weight_grad)
