"""Operations on the CPU, with NumPy and Numba; ``gpu.ops`` has the same ones, with equal signatures, for GPUs.

Arrays are C-contiguous. Sums have a fixed order, so results are bit-identical in every run. NumPy's vectorized exp and
tanh are used where available: Numba calls libm for one element at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .kernels import kernel, prefetch, reduction, sum_rows as sum_rows
from .layout import Array

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, SplitMix64's step
_ROWS_AHEAD = 4  # prefetch distance in rows; 2 to 16 perform alike


# Activations.


def activate(x: Array, kind: str, slope: float, in_place: bool, buffer: Callable[..., Array]) -> tuple[Array, Any]:
    """Return an activation of ``x``, and what ``activate_backward`` needs.

    Args:
        kind: ``none``, ``relu``, ``leaky_relu``, ``gelu``, ``tanh`` or ``sigmoid``.
        slope: Slope of a leaky ReLU for negative x.
        in_place: Whether ``x`` may be overwritten; otherwise it must not change until ``activate_backward``.
        buffer: Returns memory of x's type, given a tag and a shape; see ``nn.Layer.buffer``.
    """
    if kind == "none":
        return x, None
    if kind == "relu" and in_place:
        _relu_in_place(x.reshape(-1))
        return x, x
    y = buffer("activated", x.shape)
    if kind == "gelu":
        phi = buffer("phi", x.shape)
        _gelu(x.reshape(-1), phi.reshape(-1), y.reshape(-1))
        return y, (x, phi)
    if kind == "leaky_relu":
        _leaky_relu(x.reshape(-1), slope, y.reshape(-1))
        return y, x
    if kind == "relu":
        _relu(x.reshape(-1), y.reshape(-1))
    elif kind == "tanh":
        np.tanh(x, out=y)
    else:
        np.abs(x, out=y)
        np.negative(y, out=y)
        np.exp(y, out=y)
        _sigmoid(x.reshape(-1), y.reshape(-1))
    return y, y


def activate_backward(kept: Any, kind: str, slope: float, dy: Array) -> None:
    """Replace ``dy`` with the gradient of x; ``kept`` is the second result of ``activate`` or ``add_bias``."""
    if kind == "relu":
        _relu_backward(kept.reshape(-1), dy.reshape(-1))
    elif kind == "leaky_relu":
        _leaky_relu_backward(kept.reshape(-1), slope, dy.reshape(-1))
    elif kind == "gelu":
        x, phi = kept
        _gelu_backward(x.reshape(-1), phi.reshape(-1), dy.reshape(-1))
    elif kind == "tanh":
        _tanh_backward(kept.reshape(-1), dy.reshape(-1))
    elif kind == "sigmoid":
        _sigmoid_backward(kept.reshape(-1), dy.reshape(-1))


def add_bias(product: Array, bias: Array, kind: str, slope: float, buffer: Callable[..., Array]) -> tuple[Array, Any]:
    """Add ``bias``, shape (columns,), to every row of ``product``, shape (rows, columns), and apply an activation.

    Overwrites ``product``; otherwise like ``activate``.
    """
    np.add(product, bias, out=product)
    return activate(product, kind, slope, True, buffer)


def add_bias_backward(kept: Any, kind: str, slope: float, dy: Array, bias_grad: Array) -> None:
    """Replace ``dy`` with the gradient of the product, and set the gradient of the bias."""
    activate_backward(kept, kind, slope, dy)
    np.add.reduce(dy, axis=0, out=bias_grad)


def add(a: Array, b: Array, total: Array) -> None:
    """Set ``total``, which may be one of the inputs, to the sum of two arrays."""
    np.add(a, b, out=total)


@kernel
def _relu(x: Array, y: Array) -> None:
    zero = y.dtype.type(0)
    for i in range(y.size):
        y[i] = zero if x[i] <= 0 else x[i]


@kernel
def _relu_in_place(x: Array) -> None:
    zero = x.dtype.type(0)
    for i in range(x.size):
        x[i] = zero if x[i] <= 0 else x[i]


@kernel
def _relu_backward(y: Array, dy: Array) -> None:
    zero = dy.dtype.type(0)
    for i in range(dy.size):
        dy[i] = zero if y[i] <= 0 else dy[i]


@kernel
def _leaky_relu(x: Array, slope: float, y: Array) -> None:
    factor = y.dtype.type(slope)
    for i in range(y.size):
        y[i] = factor * x[i] if x[i] <= 0 else x[i]


@kernel
def _leaky_relu_backward(x: Array, slope: float, dy: Array) -> None:
    factor = dy.dtype.type(slope)
    for i in range(dy.size):
        dy[i] = factor * dy[i] if x[i] <= 0 else dy[i]


@kernel
def _gelu(x: Array, phi: Array, y: Array) -> None:
    half, one, root = y.dtype.type(0.5), y.dtype.type(1), y.dtype.type(math.sqrt(0.5))
    for i in range(y.size):
        # erfc instead of 1 + erf, which would cancel in the left tail.
        phi[i] = half * math.erfc(-x[i] * root) if x[i] < 0 else half * (one + math.erf(x[i] * root))
        y[i] = x[i] * phi[i]


@kernel
def _gelu_backward(x: Array, phi: Array, dy: Array) -> None:
    half, peak = dy.dtype.type(0.5), dy.dtype.type(1 / math.sqrt(2 * math.pi))
    for i in range(dy.size):
        dy[i] *= phi[i] + x[i] * peak * math.exp(-half * x[i] * x[i])


@kernel
def _tanh_backward(y: Array, dy: Array) -> None:
    one = dy.dtype.type(1)
    for i in range(dy.size):
        dy[i] *= one - y[i] * y[i]


@kernel
def _sigmoid(x: Array, y: Array) -> None:
    """Replace ``y``, which holds ``exp(-abs(x))``, with the sigmoid of x."""
    one = y.dtype.type(1)
    for i in range(y.size):
        y[i] = (y[i] if x[i] < 0 else one) / (one + y[i])


@kernel
def _sigmoid_backward(y: Array, dy: Array) -> None:
    one = dy.dtype.type(1)
    for i in range(dy.size):
        dy[i] *= y[i] * (one - y[i])


# Embedding.


@kernel
def take_rows(weight: Array, rows: Array, y: Array) -> None:
    """Set y[i] = weight[rows[i]]; ``rows`` has any numeric type, and indices outside [0, len(weight)) give NaN."""
    for i in range(rows.size):
        # Compare before conversion: NaN cannot be converted.
        if rows[i] >= 0 and rows[i] < len(weight):
            y[i] = weight[int(rows[i])]
        else:
            y[i] = np.nan


@kernel
def add_rows(dy: Array, rows: Array, weight_grad: Array) -> None:
    """Set ``weight_grad`` to the sums of the rows of ``dy``, shape (rows.size, features), in the order of the batch."""
    weight_grad[:] = 0
    for i in range(rows.size):
        if rows[i] >= 0 and rows[i] < len(weight_grad):
            row = int(rows[i])
            for j in range(dy.shape[1]):
                weight_grad[row, j] += dy[i, j]


# Pooling.


def max_pool(x: Array, size: int, stride: int, y: Array, place: Array) -> None:
    """Set ``y`` to the maximum of each window, and ``place``, uint8, to its index in the window, row by row.

    Arrays have shape (batch, height, width, channels); windows of ``size`` by ``size`` are ``stride`` apart.
    """
    if size == 2:
        _max_pool_2(x, stride, y, place)
    else:
        _max_pool(x, size, stride, y, place)


@kernel
def _max_pool(x: Array, size: int, stride: int, y: Array, place: Array) -> None:
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
def max_pool_backward(dy: Array, place: Array, size: int, stride: int, dx: Array) -> None:
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
def average_pool(x: Array, size: int, stride: int, y: Array) -> None:
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
def average_pool_backward(dy: Array, size: int, stride: int, dx: Array) -> None:
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


# Windows of images as rows of a matrix.

# The innermost loops run along one row of a window, whose channels are contiguous both in the image and in the matrix.
# They index views that start there: Numba assumes that an index computed from several variables may be negative, and
# would not vectorize the loop.


@kernel
def copy_windows(x: Array, start: int, down: int, right: int, height: int, width: int, windows: Array) -> None:
    """Copy windows of images ``x``, shape (batch, rows, columns, channels), to ``windows[n, i, j, :size]``.

    ``windows[n, i, j]`` has its corner at ``x[n, (start + i) * down, j * right]``; elements beyond its size, height *
    width * channels, are not changed.
    """
    channels = x.shape[3]
    run = width * channels
    lines = x.reshape((x.shape[0], x.shape[1], x.shape[2] * channels))
    for n in range(windows.shape[0]):
        for i in range(windows.shape[1]):
            for k in range(height):
                line = lines[n, (start + i) * down + k]
                for j in range(windows.shape[2]):
                    source, target = line[j * right * channels :], windows[n, i, j, k * run :]
                    for c in range(run):
                        target[c] = source[c]


@kernel
def add_windows(windows: Array, start: int, down: int, right: int, height: int, width: int, x: Array) -> None:
    """Add windows to the elements that ``copy_windows`` reads them from."""
    channels = x.shape[3]
    run = width * channels
    lines = x.reshape((x.shape[0], x.shape[1], x.shape[2] * channels))
    for n in range(windows.shape[0]):
        for i in range(windows.shape[1]):
            for k in range(height):
                line = lines[n, (start + i) * down + k]
                for j in range(windows.shape[2]):
                    target, source = line[j * right * channels :], windows[n, i, j, k * run :]
                    for c in range(run):
                        target[c] += source[c]


# Dropout.


@kernel
def _mix(z: np.uint64) -> np.uint64:
    """Scramble 64 bits: the output function of SplitMix64.

    Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014, figure 16.
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@kernel
def drop(x: Array, y: Array, seed: np.uint64, layer: np.uint64, position: int, below: np.uint64, scale: float) -> None:
    """``y = x * scale`` for elements whose 32 random bits are below ``below``, else 0; shape (batch, elements).

    Each example has its own SplitMix64 stream, whose start is a hash of (seed, layer, position of the example).
    """
    factor, zero = x.dtype.type(scale), x.dtype.type(0)
    stream = _mix(_mix(seed + _GAMMA) + layer + _GAMMA)
    for i in range(x.shape[0]):
        start = _mix(stream + np.uint64(position) + np.uint64(i) + _GAMMA)
        for j in range(x.shape[1]):
            bits = _mix(start + np.uint64(j + 1) * _GAMMA) >> np.uint64(32)
            y[i, j] = x[i, j] * factor if bits < below else zero


# Normalization.


# The mean of a column is the sum of two numbers of x's type, ``center[0]`` and the much smaller ``center[1]``: a single
# one would be rounded in proportion to the mean, which may be many times the deviation. ``x - center[0]`` is exact for
# values that are near the mean in proportion to it (Sterbenz, Floating-point computation, 1974, theorem 4.3.1).


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
    for i in range(0, whole, 8):  # eight rows at a time load and store the result only once
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
    """``y = (x - center) * inverse * scale + shift``; ``center`` has shape (2, features), the others (features,)."""
    near, factor = center[0], inverse * scale
    offset = shift - center[1] * factor
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = (x[i, j] - near[j]) * factor[j] + offset[j]


@kernel
def gradient_sums(x: Array, center: Array, inverse: Array, dy: Array, sums: Array) -> None:
    """``sums[0]`` is the columns' sums of dy, ``sums[1]`` the sums of dy times the normalized x."""
    near, total, moment = center[0], sums[0], sums[1]
    rows, features = x.shape
    whole = rows - rows % 4
    sums[:] = 0
    for i in range(0, whole, 4):  # four at a time, as in ``moments``
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


# Losses of outputs, shape (batch, classes or elements). A gradient function sets ``gradient`` and returns ``weight``
# times the sum of the losses; ``scale`` is None, as only GPUs scale gradients. An evaluation returns the sum of the
# losses and, if defined, the number of correct predictions.


@kernel
def softmax_gradient(outputs: Array, labels: Array, weight: float, gradient: Array, scale: None) -> float:
    share = outputs.dtype.type(weight)
    total = 0.0
    for i in range(outputs.shape[0]):
        label = labels[i]
        if label < 0 or label >= outputs.shape[1]:
            gradient[i] = np.nan
            total += np.nan
            continue
        largest = _largest(outputs[i])
        normalizer = nothing = outputs.dtype.type(0)
        for j in range(outputs.shape[1]):
            gradient[i, j] = math.exp(outputs[i, j] - largest)
            normalizer += gradient[i, j]
            nothing += 0 * outputs[i, j]  # NaN if an output is infinite
        factor = share / normalizer
        for j in range(outputs.shape[1]):
            gradient[i, j] *= factor
        gradient[i, label] -= share
        total += math.log(normalizer) - (outputs[i, label] - largest) + nothing
    return weight * total


@kernel
def softmax_evaluate(outputs: Array, labels: Array) -> tuple[float, int]:
    total, correct = 0.0, 0
    for i in range(outputs.shape[0]):
        label = labels[i]
        if label < 0 or label >= outputs.shape[1]:
            total += np.nan
            continue
        largest = _largest(outputs[i])
        normalizer = nothing = outputs.dtype.type(0)
        for j in range(outputs.shape[1]):
            normalizer += math.exp(outputs[i, j] - largest)
            nothing += 0 * outputs[i, j]
        loss = math.log(normalizer) - (outputs[i, label] - largest) + nothing
        total += loss
        if not math.isnan(loss) and _first_largest(outputs[i]) == label:
            correct += 1
    return total, correct


@reduction
def _largest(row: Array) -> float:
    largest = row[0]
    for j in range(1, row.size):
        largest = max(largest, row[j])
    return largest


@kernel
def _first_largest(row: Array) -> int:
    best = 0
    for j in range(1, row.size):
        if row[j] > row[best]:
            best = j
    return best


@kernel
def sigmoid_gradient(outputs: Array, labels: Array, weight: float, gradient: Array, scale: None) -> float:
    share = outputs.dtype.type(weight / outputs.shape[1])
    one = outputs.dtype.type(1)
    total = 0.0
    for i in range(outputs.shape[0]):
        for j in range(outputs.shape[1]):
            z, label = outputs[i, j], outputs.dtype.type(labels[i, j])
            total += _sigmoid_loss(z, label)
            tail = math.exp(-abs(z))  # the sign that cannot overflow
            probability = (one if z >= 0 else tail) / (one + tail)
            gradient[i, j] = (probability - label) * share
    return weight / outputs.shape[1] * total


@kernel
def sigmoid_evaluate(outputs: Array, labels: Array) -> tuple[float, int]:
    total, correct = 0.0, 0
    for i in range(outputs.shape[0]):
        right = True
        for j in range(outputs.shape[1]):
            z, label = outputs[i, j], outputs.dtype.type(labels[i, j])
            loss = _sigmoid_loss(z, label)
            total += loss
            right = right and not math.isnan(loss) and (z > 0) == (label > 0.5)
        correct += 1 if right else 0
    return total / outputs.shape[1], correct


@kernel
def _sigmoid_loss(z: float, label: float) -> float:
    if not (label >= 0 and label <= 1):
        return z * np.nan
    nothing = 0 * z  # NaN if z is infinite
    return max(z, 0 * label) - z * label + math.log1p(math.exp(-abs(z))) + nothing


@reduction
def square_gradient(outputs: Array, labels: Array, weight: float, gradient: Array, scale: None) -> float:
    slope = outputs.dtype.type(2 * weight / outputs.shape[1])
    total = 0.0
    for i in range(outputs.shape[0]):
        for j in range(outputs.shape[1]):
            difference = outputs[i, j] - outputs.dtype.type(labels[i, j])
            total += difference * difference + 0 * outputs[i, j]  # NaN if an output is infinite
            gradient[i, j] = slope * difference
    return weight / outputs.shape[1] * total


@reduction
def square_evaluate(outputs: Array, labels: Array) -> float:
    total = 0.0
    for i in range(outputs.shape[0]):
        for j in range(outputs.shape[1]):
            difference = outputs[i, j] - outputs.dtype.type(labels[i, j])
            total += difference * difference + 0 * outputs[i, j]
    return total / outputs.shape[1]


# Batches and types.


@kernel
def take(stored: Array, indices: Array, scale: float, out: Array) -> None:
    """Set out[i] = scale * stored[indices[i]] row by row, converted to out's type."""
    factor = out.dtype.type(scale)
    line = max(1, 64 // stored.itemsize)
    for i in range(indices.size):
        if i + _ROWS_AHEAD < indices.size:  # rows are scattered; cache misses took half the time
            ahead = stored[indices[i + _ROWS_AHEAD]]
            for j in range(0, ahead.size, line):
                prefetch(ahead, j)  # type: ignore[call-arg]
        source, target = stored[indices[i]], out[i]
        for j in range(target.size):
            target[j] = factor * out.dtype.type(source[j])


def cast(x: Array, y: Array) -> None:
    """Set ``y`` to ``x``, rounded to its type."""
    y[...] = x


def transpose(x: Array, y: Array) -> None:
    """Set ``y`` to the transpose of the matrix ``x``, rounded to its type."""
    y[...] = x.T
