"""Layers that change an example's shape but not its elements."""

from __future__ import annotations

import math

from ..core.layout import Array, Shape
from .arguments import positive, wrong_shape
from .layer import Context, Layer


class Flatten(Layer):
    """Flattens examples of any shape to one axis."""

    supports_amp = True

    def build(self, shape: Shape) -> Shape:
        return (math.prod(shape),)

    def forward(self, x: Array, ctx: Context) -> Array:
        self._shape = x.shape
        return x.reshape(len(x), math.prod(x.shape[1:]))

    def backward(self, dy: Array) -> Array:
        return dy.reshape(self._shape)


class Reshape(Layer):
    """Changes the shape of examples, keeping the order of elements.

    Args:
        *shape: Shape of one output example, with the same number of elements.
        name: Overrides the name that the model assigns.
    """

    supports_amp = True

    def __init__(self, *shape: int, name: str | None = None) -> None:
        super().__init__(name)
        self.shape = tuple(positive(self, "shape", length) for length in shape)

    def build(self, shape: Shape) -> Shape:
        if math.prod(shape) != math.prod(self.shape):
            hint = f"{self.shape} has {math.prod(self.shape)} elements"
            raise wrong_shape(self, (math.prod(self.shape),), shape, hint)
        return self.shape

    def forward(self, x: Array, ctx: Context) -> Array:
        self._shape = x.shape
        return x.reshape(len(x), *self.shape)

    def backward(self, dy: Array) -> Array:
        return dy.reshape(self._shape)
