"""Dropout with masks that depend on the example, not on its rank or batch."""

from __future__ import annotations

import math

import numpy as np

from ..core.kernels import kernel
from ..core.layout import Array
from .arguments import within
from .layer import Context, Layer

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, SplitMix64's step
_UINT64 = 2**64 - 1


class Dropout(Layer):
    """Sets each element to zero with probability ``rate`` in training, and divides the others by 1 - rate.

    Whether an element is dropped depends only on the seed, the layer's index in the model, the example's position in
    the stream of examples, and the element. No mask is stored.

    Srivastava et al., Dropout: a simple way to prevent neural networks from overfitting, JMLR 2014.

    Args:
        rate: In [0, 1).
        name: Overrides the name that the model assigns.
    """

    supports_amp = True

    def __init__(self, rate: float, name: str | None = None) -> None:
        super().__init__(name)
        self.rate = within(self, "rate", rate, 0, 1)
        self._ctx = Context()

    def forward(self, x: Array, ctx: Context) -> Array:
        self._ctx = ctx
        if not self._drops(ctx):
            return x
        x = self.cast_input(x, "x")
        y = self.activations("y", x.shape)
        self._mask(x, y)
        return y

    def backward(self, dy: Array) -> Array:
        if not self._drops(self._ctx):
            return dy
        dy = self.cast_input(dy, "dy")
        dx = self.activations("dx", dy.shape)  # in place the loop would not vectorize
        self._mask(dy, dx)
        return dx

    def _drops(self, ctx: Context) -> bool:
        return ctx.training and self.rate > 0

    def _mask(self, x: Array, y: Array) -> None:
        rows = (len(x), math.prod(x.shape[1:]))
        keep = 1 - self.rate
        self.dispatch(_drop)(
            x.reshape(rows),
            y.reshape(rows),
            np.uint64(self._ctx.seed & _UINT64),
            np.uint64(self.index),
            self._ctx.position if self.device.is_gpu else np.uint64(self._ctx.position),
            np.uint64(round(keep * 2**32)),
            1 / keep,
        )


@kernel
def _mix(z: np.uint64) -> np.uint64:
    """Scramble 64 bits: the output function of SplitMix64.

    Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014, figure 16.
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@kernel
def _drop(
    x: Array, y: Array, seed: np.uint64, layer: np.uint64, position: np.uint64, below: np.uint64, scale: float
) -> None:
    """``y = x * scale`` for elements whose 32 random bits are below ``below``, else 0.

    Each example has its own SplitMix64 stream, whose start is a hash of (seed, layer, example).
    """
    factor, zero = x.dtype.type(scale), x.dtype.type(0)
    stream = _mix(_mix(seed + _GAMMA) + layer + _GAMMA)
    for i in range(x.shape[0]):
        start = _mix(stream + position + np.uint64(i) + _GAMMA)
        for j in range(x.shape[1]):
            bits = _mix(start + np.uint64(j + 1) * _GAMMA) >> np.uint64(32)
            y[i, j] = x[i, j] * factor if bits < below else zero
