"""Pooling over windows of images (height, width, channels). Windows that would exceed the image are omitted."""

from __future__ import annotations

import numpy as np

from ..core.layout import Array, Shape
from ..errors import JobError
from .activation import NO_ACTIVATION
from .arguments import positive, wrong_shape
from .layer import Context, Layer


class _Pool(Layer):
    """A window of ``size`` by ``size`` that moves with ``stride``."""

    def __init__(self, size: int, stride: int | None = None, name: str | None = None) -> None:
        super().__init__(name)
        self.size = positive(self, "size", size)
        self.stride = self.size if stride is None else positive(self, "stride", stride)

    def build(self, shape: Shape) -> Shape:
        if len(shape) != 3:
            raise wrong_shape(self, ("height", "width", "channels"), shape, "insert Reshape(h, w, c) before it")
        height, width, channels = shape
        if min(height, width) < self.size:
            raise JobError(f"{type(self).__name__}: size is {self.size}, must be <= the image size ({height}, {width})")
        self._output = self._steps(height), self._steps(width), channels
        return self._output

    def _steps(self, length: int) -> int:
        return (length - self.size) // self.stride + 1


class MaxPool(_Pool):
    """Maximum of each window. The gradient goes to the first maximum in row-major order.

    A window that contains NaN gives NaN.

    Args:
        size: Height and width of the window, at most 16.
        stride: Stride of the window; by default ``size``.
        name: Overrides the name that the model assigns.

    Attributes:
        activation: Kind and slope of the ReLU before this layer. This layer applies the ReLU to its own outputs, which
            are fewer; the result and the gradients are the same. Set by the container.
    """

    supports_amp = True
    activation: tuple[str, float] = NO_ACTIVATION

    def __init__(self, size: int, stride: int | None = None, name: str | None = None) -> None:
        super().__init__(size, stride, name)
        if self.size > 16:
            raise JobError(f"MaxPool: size is {size}, must be <= 16")

    def forward(self, x: Array, ctx: Context) -> Array:
        x = self.cast_input(x, "x")
        self._shape = x.shape
        y = self.activations("y", (len(x), *self._output))
        self._place = self.buffer("place", y.shape, np.uint8)
        self.ops.max_pool(x, self.size, self.stride, y, self._place)
        y, self._kept = self.ops.activate(y, *self.activation, True, self.activations)
        return y

    def backward(self, dy: Array) -> Array | None:
        if not self.needs_dx:
            return None
        dy = self.cast_input(dy, "dy")
        self.ops.activate_backward(self._kept, *self.activation, dy)
        dx = self.activations("dx", self._shape)
        self.ops.max_pool_backward(dy, self._place, self.size, self.stride, dx)
        return dx


class AveragePool(_Pool):
    """Mean of each window.

    Args:
        size: Height and width of the window.
        stride: Stride of the window; by default ``size``.
        name: Overrides the name that the model assigns.
    """

    supports_amp = True

    def forward(self, x: Array, ctx: Context) -> Array:
        x = self.cast_input(x, "x")
        self._shape = x.shape
        y = self.activations("y", (len(x), *self._output))
        self.ops.average_pool(x, self.size, self.stride, y)
        return y

    def backward(self, dy: Array) -> Array | None:
        if not self.needs_dx:
            return None
        dy = self.cast_input(dy, "dy")
        dx = self.activations("dx", self._shape)
        self.ops.average_pool_backward(dy, self.size, self.stride, dx)
        return dx
