"""Dropout with masks that depend on the example, not on its rank or batch."""

from __future__ import annotations

import math

import numpy as np

from ..core.layout import Array
from .arguments import within
from .layer import Context, Layer

_UINT64 = 2**64 - 1


class Dropout(Layer):
    """Sets each element to zero with probability ``rate`` in training, and divides the others by 1 - rate.

    The mask of an example depends only on the seed, the layer's index in the model, and the example's position in the
    stream of examples. No mask is stored.

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
        dx = self.activations("dx", dy.shape)  # computed in place, the loop would not vectorize
        self._mask(dy, dx)
        return dx

    def _drops(self, ctx: Context) -> bool:
        return ctx.training and self.rate > 0

    def _mask(self, x: Array, y: Array) -> None:
        rows = (len(x), math.prod(x.shape[1:]))
        keep = 1 - self.rate
        self.ops.drop(
            x.reshape(rows),
            y.reshape(rows),
            np.uint64(self._ctx.seed & _UINT64),
            np.uint64(self.index),
            self._ctx.position,
            np.uint64(round(keep * 2**32)),
            1 / keep,
        )
