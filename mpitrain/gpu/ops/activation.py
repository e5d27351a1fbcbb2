"""Element-wise activations, alone or fused with the preceding bias; there are no Numba versions.

``slope`` is the slope of a leaky ReLU for negative inputs.
"""

from __future__ import annotations

import numpy as np

from ...core.layout import Array
from .grid import THREADS, WARP, add_columns, begin, empty, flat, int32, int64, named, real, shares

ACTIVATIONS = ("none", "relu", "leaky_relu", "gelu", "tanh", "sigmoid")  # in the order of activation.cu


def activate(x: Array, activation: str, slope: float, y: Array) -> None:
    """Set ``y`` to an activation, one of ``ACTIVATIONS``, of ``x``; they may be the same array."""
    arguments = (x, _number(activation), real(x)(slope), int64(x.size), y)
    flat("activation", "activate", x, x.size, arguments)


def activate_backward(kept: Array, activation: str, slope: float, dy: Array) -> None:
    """Replace ``dy`` with the gradient of x; ``kept`` is y, or x for GELU."""
    arguments = (kept, _number(activation), real(dy)(slope), int64(dy.size), dy)
    flat("activation", "activate_backward", dy, dy.size, arguments)


def add(a: Array, b: Array, total: Array) -> None:
    """Set ``total``, which may be one of the inputs, to the sum of two arrays."""
    flat("activation", "add", total, total.size, (a, b, int64(total.size), total))


def add_bias(product: Array, bias: Array, activation: str, slope: float, y: Array | None = None) -> None:
    """Add ``bias`` to every row of ``product``, and write the activation to ``y``, or in place if None.

    Args:
        product: Shape (rows, columns).
        bias: Shape (columns,).
        activation: One of ``ACTIVATIONS``.
        y: Same shape as ``product``, or None.
    """
    y = product if y is None else y
    sizes = int64(product.size), int32(product.shape[1])
    arguments = (product, bias, _number(activation), real(y)(slope), *sizes, y)
    flat("activation", "add_bias", y, y.size, arguments)


def add_bias_backward(kept: Array | None, activation: str, slope: float, dy: Array, bias_grad: Array) -> None:
    """Replace ``dy`` with the gradient of the product, and set the gradient of the bias.

    Args:
        kept: Output of the activation in ``add_bias``; for GELU its input; None without activation.
    """
    rows, columns = dy.shape
    packs = -(-columns * dy.itemsize // 16)
    across = min(WARP, 1 << (packs - 1).bit_length())  # threads per row
    tiles, down = -(-packs // across), THREADS // across
    shared = shares(rows, 4 * down, tiles)
    parts = empty((shared, columns), np.float64)
    sizes = int64(rows), int32(columns)
    known = np.uint64(0) if kept is None else kept
    arguments = (known, _number(activation), real(dy)(slope), *sizes, dy, parts, bias_grad)
    begin("activation", named("add_bias_backward", dy), (tiles, shared), (across, down), arguments)
    if shared > 1:
        add_columns(parts, bias_grad)


def _number(activation: str) -> np.int32:
    return int32(ACTIVATIONS.index(activation))
