"""Normalization to mean 0 and variance 1, over the batch for each channel or over the channels of each position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.layout import Array, Shape
from .arguments import positive, within, wrong_shape
from .init import ones, zeros
from .layer import Context, Layer, SumOverWorkers


class BatchNorm(Layer):
    """Normalizes each index of the last axis over the batch and all other axes, then scales and shifts it.

    ``mean`` and ``variance`` (biased) are running averages, used during validation. Statistics are computed in
    float64, with an error that does not grow with the ratio of mean to deviation.

    Ioffe and Szegedy, Batch normalization, ICML 2015, algorithms 1 and 2.

    Args:
        features: Length of the last axis.
        momentum: Weight of the old value in the running averages, in [0, 1).
        eps: Added to the variance.
        sync: Whether to compute statistics over the batches of all workers, as if they were one batch. ``forward`` and
            ``backward`` are then collective over the workers: ``forward`` computes two sums over the workers,
            ``backward`` one sum.
        name: Overrides the name that the model assigns.
    """

    supports_amp = True
    scale: Array
    scale_grad: Array
    shift: Array
    shift_grad: Array
    mean: Array
    mean_grad: Array
    variance: Array
    variance_grad: Array

    def __init__(
        self, features: int, momentum: float = 0.99, eps: float = 1e-5, sync: bool = False, name: str | None = None
    ) -> None:
        super().__init__(name)
        self.features = positive(self, "features", features)
        self.momentum = within(self, "momentum", momentum, 0, 1)
        self.eps = within(self, "eps", eps, 0, math.inf)
        self.sync = sync
        self._ctx = Context()

    def build(self, shape: Shape) -> Shape:
        _check_last(self, shape, self.features)
        self.declare("scale", (self.features,), ones)
        self.declare("shift", (self.features,), zeros)
        self.declare("mean", (self.features,), zeros, kind="state")
        self.declare("variance", (self.features,), ones, kind="state")
        return shape

    def forward(self, x: Array, ctx: Context) -> Array:
        x = self.cast_input(x, "x")
        self._ctx, self._x = ctx, x.reshape(-1, self.features)
        self._center, self._inverse = self.buffer("center", (2, self.features)), self.buffer("inverse", self.mean.shape)
        if ctx.training:
            self._use_batch(ctx, len(x))
        else:
            self._center[0], self._center[1] = self.mean, 0
            self._inverse[...] = 1 / self.device.xp.sqrt(self.variance + self.eps)
        y = self.activations("y", x.shape)
        self.ops.normalize(self._x, self._center, self._inverse, self.scale, self.shift, y.reshape(self._x.shape))
        return y

    def backward(self, dy: Array) -> Array | None:
        dy = self.cast_input(dy, "dy")
        rows = dy.reshape(self._x.shape)
        sums = self.buffer("grad_sums", (2, self.features), np.float64)
        self.ops.gradient_sums(self._x, self._center, self._inverse, rows, sums)
        self.shift_grad[...], self.scale_grad[...] = sums
        if not self.needs_dx:
            return None
        if self._ctx.training:
            if self.sync and self._ctx.sum_over_workers is not None:
                self._ctx.sum_over_workers(sums)
            sums /= self._count
        else:
            sums[...] = 0  # running statistics do not depend on x
        self.ops.normalize_backward(self._x, self._center, self._inverse, self.scale, sums, rows)
        return dy

    def _use_batch(self, ctx: Context, batch: int) -> None:
        """Compute the statistics of this batch, and set the increments of the running statistics."""
        moments = self.buffer("moments", (3, self.features), np.float64)
        self.ops.moments(self._x, moments)
        self._count: Any = len(self._x)
        if self.sync and ctx.sum_over_workers is not None:
            self._join_workers(moments, ctx.sum_over_workers)
        origin, offset, variance = moments
        mean = origin + offset
        self._center[0] = mean
        self._center[1] = origin - self._center[0] + offset
        self._inverse[...] = 1 / self.device.xp.sqrt(variance + self.eps)
        share = (1 - self.momentum) * batch * ctx.weight
        self.mean_grad[...] = share * (mean - self.mean)
        self.variance_grad[...] = share * (variance - self.variance)

    def _join_workers(self, moments: Array, sum_over_workers: SumOverWorkers) -> None:
        """Replace the moments and the number of rows of this worker's batch with the values of the joined batch.

        First the workers compute a common origin, the mean of all rows up to rounding. The second sum adds moments
        about this origin, so that a large mean causes no cancellation.
        """
        origin, offset, variance = moments
        sums = self.buffer("sums", (self.features + 1,), np.float64)
        sums[:-1] = (origin + offset) * self._count
        sums[-1] = self._count
        sum_over_workers(sums)
        share, self._count = self._count / sums[-1:], sums[-1:]
        mean = sums[:-1] / self._count
        offset += origin - mean
        origin[...] = mean
        variance += offset * offset
        moments[1:] *= share
        sum_over_workers(moments[1:])
        variance -= offset * offset
        self.device.xp.maximum(variance, 0, out=variance)  # against rounding errors; NaN is preserved


class LayerNorm(Layer):
    """Normalizes the last axis of every example at every position, then scales and shifts each index.

    Ba, Kiros and Hinton, Layer normalization, arXiv:1607.06450, equation 4.

    Args:
        features: Length of the last axis.
        eps: Added to the variance.
        name: Overrides the name that the model assigns.
    """

    supports_amp = True
    scale: Array
    scale_grad: Array
    shift: Array
    shift_grad: Array

    def __init__(self, features: int, eps: float = 1e-5, name: str | None = None) -> None:
        super().__init__(name)
        self.features = positive(self, "features", features)
        self.eps = within(self, "eps", eps, 0, math.inf)

    def build(self, shape: Shape) -> Shape:
        _check_last(self, shape, self.features)
        self.declare("scale", (self.features,), ones)
        self.declare("shift", (self.features,), zeros)
        return shape

    def forward(self, x: Array, ctx: Context) -> Array:
        rows = self.cast_input(x, "x").reshape(-1, self.features)
        y = self.activations("y", x.shape)
        self._normal = self.activations("normal", rows.shape)
        self._inverse = self.buffer("inverse", rows.shape[:1])
        self.ops.layer_norm(rows, self.eps, self.scale, self.shift, self._normal, self._inverse, y.reshape(rows.shape))
        return y

    def backward(self, dy: Array) -> Array | None:
        dy = self.cast_input(dy, "dy")
        sums = self.buffer("grad_sums", (2, self.features), np.float64)
        self.ops.layer_norm_backward(self._normal, self._inverse, self.scale, dy.reshape(self._normal.shape), sums)
        self.shift_grad[...], self.scale_grad[...] = sums
        return dy if self.needs_dx else None


def _check_last(layer: Layer, shape: Shape, features: int) -> None:
    if not shape or shape[-1] != features:
        hint = f"set features={shape[-1]}" if shape else ""
        raise wrong_shape(layer, ("...", features), shape, hint)
