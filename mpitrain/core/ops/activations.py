"""Activations, and sums with a bias.

NumPy's vectorized exp and tanh are used where available: Numba calls libm for one element at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..kernels import kernel
from ..layout import Array

_SUMMED_ROWS = 256  # rows whose sum is added to a total: the rounding error of float32 grows with the longest sum


class Kind(NamedTuple):
    """An activation; x, y and dy may have any shape.

    Attributes:
        forward: Takes x, the slope, y, and ``buffer``; sets y, and returns what ``backward`` needs.
        backward: Takes that result, the slope, and dy; replaces dy with the gradient of x.
    """

    forward: Callable[[Array, float, Array, Callable[..., Array]], Any]
    backward: Callable[[Any, float, Array], None]


def activate(x: Array, kind: str, slope: float, in_place: bool, buffer: Callable[..., Array]) -> tuple[Array, Any]:
    """Return an activation of ``x``, and the array that ``activate_backward`` needs.

    Args:
        kind: One of ``ACTIVATIONS``.
        slope: Slope of a leaky ReLU for negative x.
        in_place: Whether ``x`` may be overwritten; otherwise it must not change until ``activate_backward``.
        buffer: Returns memory of x's type, given a tag and a shape; see ``nn.Layer.buffer``.

    Raises:
        ValueError: There is no such kind.
    """
    if kind == "none":
        return x, None
    if kind == "relu" and in_place:
        _relu_in_place(x.reshape(-1))
        return x, x
    forward, y = find_kind(kind).forward, buffer("activated", x.shape)
    return y, forward(x, slope, y, buffer)


def activate_backward(kept: Any, kind: str, slope: float, dy: Array) -> None:
    """Replace ``dy`` with the gradient of x; ``kept`` is the second result of ``activate`` or ``add_bias``."""
    find_kind(kind).backward(kept, slope, dy)


def find_kind(kind: str) -> Kind:
    """Return an activation by its name.

    Raises:
        ValueError: There is no such kind.
    """
    if kind not in ACTIVATIONS:
        raise ValueError(f"the activation is {kind!r}: must be {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[kind]


def add_bias(product: Array, bias: Array, kind: str, slope: float, buffer: Callable[..., Array]) -> tuple[Array, Any]:
    """Add ``bias``, shape (columns,), to every row of ``product``, shape (rows, columns), and apply an activation.

    Overwrites ``product``; otherwise like ``activate``.
    """
    if kind == "relu":
        _add_bias_relu(product, bias)
        return product, product
    _add_bias(product, bias)
    return activate(product, kind, slope, True, buffer)


def add_bias_backward(kept: Any, kind: str, slope: float, dy: Array, bias_grad: Array) -> None:
    """Replace ``dy`` with the gradient of the product, and set the gradient of the bias."""
    is_wide = bias_grad.size > 1  # NumPy sums a single column pairwise, which is more accurate
    if kind == "relu" and is_wide:
        _relu_backward_sum(kept, dy, bias_grad)
        return
    activate_backward(kept, kind, slope, dy)
    if is_wide:
        _sum_columns(dy, bias_grad)
    else:
        np.add.reduce(dy, axis=0, out=bias_grad)


def add(a: Array, b: Array, total: Array) -> None:
    """Set ``total``, which may be one of the inputs, to the sum of two arrays."""
    np.add(a, b, out=total)


@kernel
def _add_bias(product: Array, bias: Array) -> None:
    for i in range(product.shape[0]):
        row = product[i]
        for j in range(bias.size):
            row[j] += bias[j]


@kernel
def _add_bias_relu(product: Array, bias: Array) -> None:
    zero = product.dtype.type(0)
    for i in range(product.shape[0]):
        row = product[i]
        for j in range(bias.size):
            value = row[j] + bias[j]
            row[j] = zero if value <= 0 else value


@kernel
def _relu_backward_sum(y: Array, dy: Array, sums: Array) -> None:
    """Set ``dy`` to zero where ``y`` is zero, and ``sums`` to the sums of the columns of ``dy``."""
    zero, block_sums = dy.dtype.type(0), np.empty(sums.size, sums.dtype)
    sums[:] = 0
    for start in range(0, dy.shape[0], _SUMMED_ROWS):
        block_sums[:] = 0
        for i in range(start, min(start + _SUMMED_ROWS, dy.shape[0])):
            output, gradient = y[i], dy[i]
            for j in range(block_sums.size):
                value = zero if output[j] <= 0 else gradient[j]
                gradient[j] = value
                block_sums[j] += value
        for j in range(sums.size):
            sums[j] += block_sums[j]


@kernel
def _sum_columns(x: Array, sums: Array) -> None:
    block_sums = np.empty(sums.size, sums.dtype)
    sums[:] = 0
    for start in range(0, x.shape[0], _SUMMED_ROWS):
        block_sums[:] = 0
        for i in range(start, min(start + _SUMMED_ROWS, x.shape[0])):
            row = x[i]
            for j in range(block_sums.size):
                block_sums[j] += row[j]
        for j in range(sums.size):
            sums[j] += block_sums[j]


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


def _relu_forward(x: Array, slope: float, y: Array, buffer: Callable[..., Array]) -> Array:
    _relu(x.reshape(-1), y.reshape(-1))
    return y


def _leaky_relu_forward(x: Array, slope: float, y: Array, buffer: Callable[..., Array]) -> Array:
    _leaky_relu(x.reshape(-1), slope, y.reshape(-1))
    return x


def _gelu_forward(x: Array, slope: float, y: Array, buffer: Callable[..., Array]) -> tuple[Array, Array]:
    phi = buffer("phi", x.shape)
    _gelu(x.reshape(-1), phi.reshape(-1), y.reshape(-1))
    return x, phi


def _tanh_forward(x: Array, slope: float, y: Array, buffer: Callable[..., Array]) -> Array:
    return np.tanh(x, out=y)


def _sigmoid_forward(x: Array, slope: float, y: Array, buffer: Callable[..., Array]) -> Array:
    np.abs(x, out=y)
    np.negative(y, out=y)
    np.exp(y, out=y)
    _sigmoid(x.reshape(-1), y.reshape(-1))
    return y


# By name. On GPUs, the order gives the numbers of kinds.
ACTIVATIONS = {
    "none": Kind(lambda x, slope, y, buffer: None, lambda kept, slope, dy: None),
    "relu": Kind(_relu_forward, lambda y, slope, dy: _relu_backward(y.reshape(-1), dy.reshape(-1))),
    "leaky_relu": Kind(
        _leaky_relu_forward, lambda x, slope, dy: _leaky_relu_backward(x.reshape(-1), slope, dy.reshape(-1))
    ),
    "gelu": Kind(_gelu_forward, lambda kept, slope, dy: _gelu_backward(*(array.reshape(-1) for array in (*kept, dy)))),
    "tanh": Kind(_tanh_forward, lambda y, slope, dy: _tanh_backward(y.reshape(-1), dy.reshape(-1))),
    "sigmoid": Kind(_sigmoid_forward, lambda y, slope, dy: _sigmoid_backward(y.reshape(-1), dy.reshape(-1))),
}
