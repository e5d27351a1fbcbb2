"""Batch and layer normalization."""

from __future__ import annotations

import math

import numpy as np

from ..kernels import kernel, reduction
from ..layout import Array

# The mean of a column is the sum of two numbers of x's type, ``center[0]`` and the much smaller ``center[1]``. A single
# number would be rounded in proportion to the mean, which may be many times the deviation. ``x - center[0]`` is exact
# for x from half to twice ``center[0]`` (Sterbenz, Floating-point computation, 1974, theorem 4.3.1).


@kernel
def moments(x: Array, result: Array) -> None:
    """Compute the moments of the columns: the first row, the mean minus the first row, and the biased variance.

    Groups of rows are centered on their own means, and merged. (Chan, Golub and LeVeque, Algorithms for computing the
    sample variance: analysis and recommendations, The American Statistician 37, 1983.)

    Args:
        x: Shape (rows, features).
        result: Shape (3, features), float64.
    """
    first, mean, squares = result[0], result[1], result[2]
    rows, features = x.shape
    whole = rows - rows % 8
    result[:] = 0
    for j in range(features):
        first[j] = x[0, j]
    for i in range(0, whole, 8):  # for eight rows, the result is loaded and stored only once
        share = 8 / (i + 8)
        before = i * share
        x0, x1, x2, x3, x4, x5, x6, x7 = x[i], x[i + 1], x[i + 2], x[i + 3], x[i + 4], x[i + 5], x[i + 6], x[i + 7]
        for j in range(features):
            a, b, c, d = x0[j] - first[j], x1[j] - first[j], x2[j] - first[j], x3[j] - first[j]
            e, f, g, h = x4[j] - first[j], x5[j] - first[j], x6[j] - first[j], x7[j] - first[j]
            own = (((a + b) + (c + d)) + ((e + f) + (g + h))) / 8
            a, b, c, d, e, f, g, h = a - own, b - own, c - own, d - own, e - own, f - own, g - own, h - own
            apart = own - mean[j]
            mean[j] += apart * share
            squares[j] += ((a * a + b * b) + (c * c + d * d)) + ((e * e + f * f) + (g * g + h * h))
            squares[j] += apart * apart * before
    for i in range(whole, rows):
        share = 1 / (i + 1)
        before = i * share
        for j in range(features):
            apart = x[i, j] - first[j] - mean[j]
            mean[j] += apart * share
            squares[j] += apart * apart * before
    for j in range(features):
        squares[j] /= rows


@kernel
def normalize(x: Array, center: Array, inverse: Array, scale: Array, shift: Array, y: Array) -> None:
    """Set ``y = (x - center) * inverse * scale + shift``; ``center`` has shape (2, features), others (features,)."""
    near, factor = center[0], inverse * scale
    offset = shift - center[1] * factor
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = (x[i, j] - near[j]) * factor[j] + offset[j]


@kernel
def gradient_sums(x: Array, center: Array, inverse: Array, dy: Array, sums: Array) -> None:
    """Set ``sums[0]`` to the columns' sums of dy, ``sums[1]`` to the sums of dy times the normalized x."""
    near, total, moment = center[0], sums[0], sums[1]
    rows, features = x.shape
    whole = rows - rows % 4
    sums[:] = 0
    for i in range(0, whole, 4):  # four rows at a time; see ``moments``
        x0, x1, x2, x3 = x[i], x[i + 1], x[i + 2], x[i + 3]
        dy0, dy1, dy2, dy3 = dy[i], dy[i + 1], dy[i + 2], dy[i + 3]
        for j in range(features):
            a, b, c, d = np.float64(dy0[j]), np.float64(dy1[j]), np.float64(dy2[j]), np.float64(dy3[j])
            total[j] += (a + b) + (c + d)
            moment[j] += a * (x0[j] - near[j]) + b * (x1[j] - near[j])
            moment[j] += c * (x2[j] - near[j]) + d * (x3[j] - near[j])
    for i in range(whole, rows):
        for j in range(features):
            total[j] += dy[i, j]
            moment[j] += np.float64(dy[i, j]) * (x[i, j] - near[j])
    for j in range(features):
        moment[j] = (moment[j] - total[j] * center[1, j]) * inverse[j]


@kernel
def normalize_backward(x: Array, center: Array, inverse: Array, scale: Array, means: Array, dy: Array) -> None:
    """Replace ``dy`` with the gradient of x, given the means of the sums of ``gradient_sums``."""
    near, factor = center[0], inverse * scale
    slope = (means[1] * inverse).astype(dy.dtype)
    offset = (means[0] - means[1] * inverse * center[1]).astype(dy.dtype)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            dy[i, j] = factor[j] * (dy[i, j] - offset[j] - (x[i, j] - near[j]) * slope[j])


@reduction
def layer_norm(x: Array, eps: float, scale: Array, shift: Array, normal: Array, inverse: Array, y: Array) -> None:
    features = x.dtype.type(x.shape[1])
    for i in range(x.shape[0]):
        mean = variance = x.dtype.type(0)
        for j in range(x.shape[1]):
            mean += x[i, j]
        mean /= features
        for j in range(x.shape[1]):
            variance += (x[i, j] - mean) * (x[i, j] - mean)
        inverse[i] = 1 / math.sqrt(variance / features + x.dtype.type(eps))
        for j in range(x.shape[1]):
            normal[i, j] = (x[i, j] - mean) * inverse[i]
            y[i, j] = normal[i, j] * scale[j] + shift[j]


@reduction
def layer_norm_backward(normal: Array, inverse: Array, scale: Array, dy: Array, sums: Array) -> None:
    """Replace ``dy`` with the gradient of x; ``sums`` are the sums over rows of dy and of dy times ``normal``."""
    features = dy.dtype.type(dy.shape[1])
    total, moment = sums[0], sums[1]
    sums[:] = 0
    for i in range(dy.shape[0]):
        mean = slope = dy.dtype.type(0)
        for j in range(dy.shape[1]):
            total[j] += dy[i, j]
            moment[j] += dy[i, j] * normal[i, j]
            mean += dy[i, j] * scale[j]
            slope += dy[i, j] * scale[j] * normal[i, j]
        mean, slope = mean / features, slope / features
        for j in range(dy.shape[1]):
            dy[i, j] = inverse[i] * (dy[i, j] * scale[j] - mean - normal[i, j] * slope)
