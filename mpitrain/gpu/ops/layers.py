"""Kernels of the layers in ``nn``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.layout import Array
from .grid import (
    LINES,
    THREADS,
    add_columns,
    begin,
    cells,
    empty,
    flat,
    int32,
    int64,
    kind,
    named,
    real,
    shares,
    sum_columns,
    teams,
)

# nn/dense.py


def take_rows(weight: Array, rows: Array, y: Array) -> None:
    """``rows`` has any numeric type; indices outside [0, len(weight)) give NaN."""
    sizes = int64(rows.size), int64(len(weight)), int32(weight.shape[1])
    cells("embedding", "take_rows", y, rows.size, y.shape[1], (weight, rows, kind(rows), *sizes, y))


def add_rows(dy: Array, rows: Array, weight_grad: Array) -> None:
    """Set ``weight_grad``, summing in the order of the batch. Takes time in O(len(weight_grad) * rows.size / 32)."""
    vocabulary, features = weight_grad.shape
    sizes = int64(rows.size), int64(vocabulary), int32(features)
    packs = -(-features * weight_grad.itemsize // 16)
    cells("embedding", "add_rows", dy, vocabulary, packs, (dy, rows, kind(rows), *sizes, weight_grad))


# nn/pool.py


def max_pool(x: Array, size: int, stride: int, y: Array, place: Array) -> None:
    """``place`` is the index of each maximum in its window, row by row."""
    _pool("max_pool", x, y, y, (x, *_pooled(x, size, stride, y), int64(len(x)), y, place))


def max_pool_2(x: Array, stride: int, y: Array, place: Array) -> None:
    """``max_pool`` for a size of 2."""
    max_pool(x, 2, stride, y, place)


def max_pool_backward(dy: Array, place: Array, size: int, stride: int, dx: Array) -> None:
    _pool("max_pool_backward", dx, dy, dx, (dy, place, *_pooled(dx, size, stride, dy), int64(len(dx)), dx))


def average_pool(x: Array, size: int, stride: int, y: Array) -> None:
    share = real(y)(1 / (size * size))
    _pool("average_pool", x, y, y, (x, *_pooled(x, size, stride, y), int64(len(x)), share, y))


def average_pool_backward(dy: Array, size: int, stride: int, dx: Array) -> None:
    share = real(dx)(1 / (size * size))
    _pool("average_pool_backward", dx, dy, dx, (dy, *_pooled(dx, size, stride, dy), int64(len(dx)), share, dx))


# nn/windows.py


def copy_windows(x: Array, start: int, down: int, right: int, height: int, width: int, windows: Array) -> None:
    """``windows[n, i, j]`` has its corner at ``x[n, (start + i) * down, j * right]``, for any number of images."""
    batch, lines, columns = windows.shape[:3]
    geometry = _windows(x, start, down, right, height, width, windows)
    arguments = (x, *geometry, int64(batch), windows)
    cells("windows", "copy_windows", windows, batch * lines * columns, height * width * x.shape[3], arguments)


def add_windows(windows: Array, start: int, down: int, right: int, height: int, width: int, x: Array) -> None:
    """Add windows to the elements that ``copy_windows`` reads them from."""
    geometry = _windows(x, start, down, right, height, width, windows)
    batch, lines, columns, channels = x.shape
    cells("windows", "add_windows", x, batch * lines, columns * channels, (windows, *geometry, int64(batch), x))


# nn/dropout.py


def drop(x: Array, y: Array, seed: int, layer: int, position: Array, below: int, scale: float) -> None:
    """``y = x * scale`` for elements whose 32 random bits are below ``below``, else 0.

    Args:
        position: Shape (1,), uint64.
    """
    rows, columns = x.shape
    words = np.uint64(seed), np.uint64(layer), position, np.uint64(below)
    cells("dropout", "drop", y, rows, columns, (x, y, int64(rows), int32(columns), *words, real(x)(scale)))


# nn/normalize.py


def moment_sums(x: Array, sums: Array) -> None:
    """``sums``, shape (2 * features + 1,): the columns' sums, the sums of their squares, and the number of rows."""
    features = x.shape[1]
    sum_columns("moment_sums", x, (x,), sums[: 2 * features])
    sums[2 * features :] = len(x)


def normalize(x: Array, center: Array, inverse: Array, scale: Array, shift: Array, y: Array) -> None:
    arguments = (x, center, inverse, scale, shift, int64(x.size), int32(x.shape[1]), y)
    flat("normalize", "normalize", y, x.size, arguments)


def gradient_sums(x: Array, center: Array, inverse: Array, dy: Array, sums: Array) -> None:
    """``sums[0]`` is the columns' sums of dy, ``sums[1]`` the sums of dy times the normalized x."""
    sum_columns("gradient_sums", x, (x, center, inverse, dy), sums)


def normalize_backward(x: Array, center: Array, inverse: Array, scale: Array, means: Array, dy: Array) -> None:
    """Replace ``dy`` with the gradient of x, given the means of the sums of ``gradient_sums``."""
    arguments = (x, center, inverse, scale, means, int64(x.size), int32(x.shape[1]), dy)
    flat("normalize", "normalize_backward", dy, x.size, arguments)


def layer_norm(x: Array, eps: float, scale: Array, shift: Array, normal: Array, inverse: Array, y: Array) -> None:
    rows, columns = x.shape
    sizes = int64(rows), int32(columns)
    teams("normalize", "layer_norm", y, (x, real(y)(eps), scale, shift, *sizes, normal, inverse, y))


def layer_norm_backward(normal: Array, inverse: Array, scale: Array, dy: Array, sums: Array) -> None:
    """Replace ``dy`` with the gradient of x; ``sums`` are the sums over rows of dy and of dy times ``normal``."""
    rows, columns = dy.shape
    arguments = normal, inverse, scale, int64(rows), int32(columns), dy
    if columns > 4096 // scale.itemsize:
        sum_columns("layer_gradient_sums", dy, (normal, dy), sums)
        teams("normalize", "long_layer_norm_backward", dy, arguments)
        return
    lines = LINES if columns * LINES <= 12288 // scale.itemsize else 1
    shared = shares(rows, lines, 1)
    parts = empty((shared, 2 * columns), np.float64)
    begin("normalize", named("layer_norm_backward", dy), (shared, 1), (THREADS // lines, lines), (*arguments, parts))
    add_columns(parts, sums)


def _pool(name: str, images: Array, pooled: Array, target: Array, arguments: tuple[Any, ...]) -> None:
    """Start one cell per pack of channels of ``target``, or per channel if they do not fill packs."""
    assert images.shape[0] == pooled.shape[0] and images.shape[3] == pooled.shape[3]
    batch, lines, columns, channels = target.shape
    assert batch * lines < 2**31
    pack = 16 // target.itemsize
    packs = channels // pack if channels % pack == 0 else channels
    cells("pool", name, target, batch * lines, columns * packs, arguments)


def _pooled(images: Array, size: int, stride: int, pooled: Array) -> tuple[np.int32, ...]:
    return tuple(map(np.int32, (*images.shape[1:], *pooled.shape[1:3], size, stride)))


def _windows(
    x: Array, start: int, down: int, right: int, height: int, width: int, windows: Array
) -> tuple[np.int32, ...]:
    return tuple(map(np.int32, (*x.shape[1:], start, down, right, height, width, *windows.shape[1:])))
