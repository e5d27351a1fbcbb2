"""Pooling over windows of images (height, width, channels). Windows that would exceed the image are omitted."""

from __future__ import annotations

import numpy as np

from ..core.kernels import kernel
from ..core.layout import Array, Shape
from ..errors import JobError
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
    """

    supports_amp = True

    def __init__(self, size: int, stride: int | None = None, name: str | None = None) -> None:
        super().__init__(size, stride, name)
        if self.size > 16:
            raise JobError(f"MaxPool: size is {size}, must be <= 16")

    def forward(self, x: Array, ctx: Context) -> Array:
        x = self.cast_input(x, "x")
        self._shape = x.shape
        y = self.activations("y", (len(x), *self._output))
        self._place = self.buffer("place", y.shape, np.uint8)
        if self.size == 2:
            self.dispatch(_max_pool_2)(x, self.stride, y, self._place)
        else:
            self.dispatch(_max_pool)(x, self.size, self.stride, y, self._place)
        return y

    def backward(self, dy: Array) -> Array | None:
        if not self.needs_dx:
            return None
        dy = self.cast_input(dy, "dy")
        dx = self.activations("dx", self._shape)
        self.dispatch(_max_pool_backward)(dy, self._place, self.size, self.stride, dx)
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
        self.dispatch(_average_pool)(x, self.size, self.stride, y)
        return y

    def backward(self, dy: Array) -> Array | None:
        if not self.needs_dx:
            return None
        dy = self.cast_input(dy, "dy")
        dx = self.activations("dx", self._shape)
        self.dispatch(_average_pool_backward)(dy, self.size, self.stride, dx)
        return dx


@kernel
def _max_pool(x: Array, size: int, stride: int, y: Array, place: Array) -> None:
    """``place`` is the index of each maximum in its window, row by row."""
    batch, height, width, channels = y.shape
    for n in range(batch):
        for i in range(height):
            for j in range(width):
                for c in range(channels):
                    y[n, i, j, c] = x[n, i * stride, j * stride, c]
                    place[n, i, j, c] = 0
                for k in range(1, size * size):
                    window = x[n, i * stride + k // size, j * stride + k % size]
                    for c in range(channels):
                        # Not "greater", which is false for NaN; a NaN that is the maximum stays.
                        larger = not (window[c] <= y[n, i, j, c]) and y[n, i, j, c] == y[n, i, j, c]
                        y[n, i, j, c] = window[c] if larger else y[n, i, j, c]
                        place[n, i, j, c] = k if larger else place[n, i, j, c]


@kernel
def _max_pool_2(x: Array, stride: int, y: Array, place: Array) -> None:
    """``_max_pool`` for the common size 2, several times faster because it has no loop over the window."""
    for n in range(y.shape[0]):
        for i in range(y.shape[1]):
            upper, lower = x[n, i * stride], x[n, i * stride + 1]
            for j in range(y.shape[2]):
                first, second = upper[j * stride], upper[j * stride + 1]
                third, fourth = lower[j * stride], lower[j * stride + 1]
                largest, source = y[n, i, j], place[n, i, j]
                for c in range(y.shape[3]):
                    value, k = first[c], np.uint8(0)
                    larger = not (second[c] <= value) and value == value
                    value, k = second[c] if larger else value, np.uint8(1) if larger else k
                    larger = not (third[c] <= value) and value == value
                    value, k = third[c] if larger else value, np.uint8(2) if larger else k
                    larger = not (fourth[c] <= value) and value == value
                    largest[c], source[c] = fourth[c] if larger else value, np.uint8(3) if larger else k


@kernel
def _max_pool_backward(dy: Array, place: Array, size: int, stride: int, dx: Array) -> None:
    zero = dx.dtype.type(0)
    dx[:] = 0
    for n in range(dy.shape[0]):
        for i in range(dy.shape[1]):
            for down in range(size):
                line = dx[n, i * stride + down]
                for j in range(dy.shape[2]):
                    gradient, source = dy[n, i, j], place[n, i, j]
                    for right in range(size):
                        target, k = line[j * stride + right], down * size + right
                        for c in range(dy.shape[3]):
                            target[c] += gradient[c] if source[c] == k else zero


@kernel
def _average_pool(x: Array, size: int, stride: int, y: Array) -> None:
    batch, height, width, channels = y.shape
    share = y.dtype.type(1 / (size * size))
    y[:] = 0
    for n in range(batch):
        for i in range(height):
            for j in range(width):
                for k in range(size * size):
                    window = x[n, i * stride + k // size, j * stride + k % size]
                    for c in range(channels):
                        y[n, i, j, c] += window[c]
                for c in range(channels):
                    y[n, i, j, c] *= share


@kernel
def _average_pool_backward(dy: Array, size: int, stride: int, dx: Array) -> None:
    batch, height, width, channels = dy.shape
    share = dx.dtype.type(1 / (size * size))
    dx[:] = 0
    for n in range(batch):
        for i in range(height):
            for j in range(width):
                for k in range(size * size):
                    window = dx[n, i * stride + k // size, j * stride + k % size]
                    for c in range(channels):
                        window[c] += dy[n, i, j, c] * share
