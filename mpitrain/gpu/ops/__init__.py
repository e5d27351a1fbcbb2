"""Operations on the GPU: those of ``core.ops``, with equal signatures. Those of optimizers are in ``updates``.

Arrays are C-contiguous device arrays, and no function waits for the device. Results that the CPU's operations return as
Python numbers are float64 arrays of shape () or (2,), which the caller reads when needed.

Results are bit-identical in every run, and on every GPU for which the compiler generates the same code: the order of
sums depends only on shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...core.layout import Array
from .grid import (
    KINDS as KINDS,
    LINES,
    THREADS,
    WARP,
    Kernels as Kernels,
    Pair as Pair,
    add_columns,
    begin,
    blocks,
    cells,
    empty,
    flat,
    int32,
    int64,
    named,
    numeric_kind,
    or_null,
    real,
    shares,
    sum_columns,
    team_grid,
    teams,
    use as use,
)

ACTIVATIONS = ("none", "relu", "leaky_relu", "gelu", "tanh", "sigmoid")  # in the order of activation.cu


# Activations.


def activate(
    x: Array, kind: str, slope: float, in_place: bool, buffer: Callable[..., Array]
) -> tuple[Array, Array | None]:
    """Return an activation of ``x``, and what ``activate_backward`` needs; see ``core.ops``."""
    y = _output(x, kind, in_place, buffer)
    flat("activation", "activate", x, x.size, (x, _number(kind), real(x)(slope), int64(x.size), y))
    return y, _kept(x, kind, y)


def activate_backward(kept: Array | None, kind: str, slope: float, dy: Array) -> None:
    """Replace ``dy`` with the gradient of x; ``kept`` is the second result of ``activate`` or ``add_bias``."""
    if kept is not None:
        arguments = (kept, _number(kind), real(dy)(slope), int64(dy.size), dy)
        flat("activation", "activate_backward", dy, dy.size, arguments)


def add(a: Array, b: Array, total: Array) -> None:
    """Set ``total``, which may be one of the inputs, to the sum of two arrays."""
    flat("activation", "add", total, total.size, (a, b, int64(total.size), total))


def add_bias(
    product: Array, bias: Array, kind: str, slope: float, buffer: Callable[..., Array]
) -> tuple[Array, Array | None]:
    """Add ``bias``, shape (columns,), to every row of ``product``, shape (rows, columns), and apply an activation.

    Overwrites ``product``; otherwise like ``activate``.
    """
    y = _output(product, kind, True, buffer)
    sizes = int64(product.size), int32(product.shape[1])
    flat("activation", "add_bias", y, y.size, (product, bias, _number(kind), real(y)(slope), *sizes, y))
    return y, _kept(product, kind, y)


def add_bias_backward(kept: Array | None, kind: str, slope: float, dy: Array, bias_grad: Array) -> None:
    """Replace ``dy`` with the gradient of the product, and set the gradient of the bias."""
    rows, columns = dy.shape
    packs = -(-columns * dy.itemsize // 16)
    across = min(WARP, 1 << (packs - 1).bit_length())  # threads per row
    tiles, down = -(-packs // across), THREADS // across
    shared = shares(rows, 4 * down, tiles)
    parts = empty((shared, columns), np.float64)
    sizes = int64(rows), int32(columns)
    arguments = (or_null(kept), _number(kind), real(dy)(slope), *sizes, dy, parts, bias_grad)
    begin("activation", named("add_bias_backward", dy), (tiles, shared), (across, down), arguments)
    if shared > 1:
        add_columns(parts, bias_grad)


def _output(x: Array, kind: str, in_place: bool, buffer: Callable[..., Array]) -> Array:
    return x if in_place and kind != "gelu" else buffer("activated", x.shape)


def _kept(x: Array, kind: str, y: Array) -> Array | None:
    """Return what backward needs: y, x for GELU, None without activation."""
    return None if kind == "none" else x if kind == "gelu" else y


def _number(kind: str) -> np.int32:
    return int32(ACTIVATIONS.index(kind))


# Embedding.


def take_rows(weight: Array, rows: Array, y: Array) -> None:
    """``rows`` has any numeric type; indices outside [0, len(weight)) give NaN."""
    sizes = int64(rows.size), int64(len(weight)), int32(weight.shape[1])
    cells("embedding", "take_rows", y, rows.size, y.shape[1], (weight, rows, numeric_kind(rows), *sizes, y))


def add_rows(dy: Array, rows: Array, weight_grad: Array) -> None:
    """Set ``weight_grad``, summing in the order of the batch. Takes time in O(len(weight_grad) * rows.size / 32)."""
    vocabulary, features = weight_grad.shape
    sizes = int64(rows.size), int64(vocabulary), int32(features)
    packs = -(-features * weight_grad.itemsize // 16)
    cells("embedding", "add_rows", dy, vocabulary, packs, (dy, rows, numeric_kind(rows), *sizes, weight_grad))


# Pooling.


def max_pool(x: Array, size: int, stride: int, y: Array, place: Array) -> None:
    """``place`` is the index of each maximum in its window, row by row."""
    _pool("max_pool", x, y, y, (x, *_pooled(x, size, stride, y), int64(len(x)), y, place))


def max_pool_backward(dy: Array, place: Array, size: int, stride: int, dx: Array) -> None:
    _pool("max_pool_backward", dx, dy, dx, (dy, place, *_pooled(dx, size, stride, dy), int64(len(dx)), dx))


def average_pool(x: Array, size: int, stride: int, y: Array) -> None:
    share = real(y)(1 / (size * size))
    _pool("average_pool", x, y, y, (x, *_pooled(x, size, stride, y), int64(len(x)), share, y))


def average_pool_backward(dy: Array, size: int, stride: int, dx: Array) -> None:
    share = real(dx)(1 / (size * size))
    _pool("average_pool_backward", dx, dy, dx, (dy, *_pooled(dx, size, stride, dy), int64(len(dx)), share, dx))


# Windows of images as rows of a matrix.


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


# Dropout.


def drop(x: Array, y: Array, seed: int, layer: int, position: Array, below: int, scale: float) -> None:
    """``y = x * scale`` for elements whose 32 random bits are below ``below``, else 0.

    Args:
        position: Shape (1,), uint64.
    """
    rows, columns = x.shape
    words = np.uint64(seed), np.uint64(layer), position, np.uint64(below)
    cells("dropout", "drop", y, rows, columns, (x, y, int64(rows), int32(columns), *words, real(x)(scale)))


# Normalization.


def moments(x: Array, result: Array) -> None:
    """Compute the moments of the columns: the first row, the mean minus the first row, and the biased variance.

    Args:
        x: Shape (rows, features).
        result: Shape (3, features), float64.
    """
    rows, columns = x.shape
    tiles = -(-columns // WARP)
    shared = shares(rows, LINES, tiles)
    parts = empty((shared, 3 * columns), np.float64)
    begin("normalize", named("moments", x), (tiles, shared), (WARP, LINES), (x, int64(rows), int32(columns), parts))
    arguments = (x, parts, int32(shared), int32(columns), result)
    begin("normalize", named("merge_moments", x), (tiles, 1), (WARP, LINES), arguments)


def normalize(x: Array, center: Array, inverse: Array, scale: Array, shift: Array, y: Array) -> None:
    """``y = (x - center) * inverse * scale + shift``; ``center`` has shape (2, features), the others (features,)."""
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


# Losses. Gradients, but not losses, are multiplied by ``scale``, shape (1,), float64, unless it is None.


def softmax_gradient(outputs: Array, labels: Array, weight: float, gradient: Array, scale: Array | None) -> Array:
    rows, classes = outputs.shape
    sizes, factor = (int64(rows), int32(classes)), real(outputs)(weight)
    arguments = (outputs, labels, numeric_kind(labels), *sizes, factor, or_null(scale), gradient)
    return _loss_of_rows("softmax_gradient", outputs, arguments, 1, weight)


def softmax_evaluate(outputs: Array, labels: Array) -> Array:
    rows, classes = outputs.shape
    arguments = (outputs, labels, numeric_kind(labels), int64(rows), int32(classes))
    return _loss_of_rows("softmax_evaluate", outputs, arguments, 2, 1.0)


def sigmoid_gradient(outputs: Array, labels: Array, weight: float, gradient: Array, scale: Array | None) -> Array:
    share = weight / outputs.shape[1]
    factor = real(outputs)(share)
    arguments = (outputs, labels, numeric_kind(labels), int64(outputs.size), factor, or_null(scale), gradient)
    return _loss_of_elements("sigmoid_gradient", outputs, arguments, share)


def sigmoid_evaluate(outputs: Array, labels: Array) -> Array:
    rows, columns = outputs.shape
    arguments = (outputs, labels, numeric_kind(labels), int64(rows), int32(columns))
    return _loss_of_rows("sigmoid_evaluate", outputs, arguments, 2, 1 / columns)


def square_gradient(outputs: Array, labels: Array, weight: float, gradient: Array, scale: Array | None) -> Array:
    share = weight / outputs.shape[1]
    slope = real(outputs)(2 * weight / outputs.shape[1])
    arguments = (outputs, labels, numeric_kind(labels), int64(outputs.size), slope, or_null(scale), gradient)
    return _loss_of_elements("square_gradient", outputs, arguments, share)


def square_evaluate(outputs: Array, labels: Array) -> Array:
    arguments = (outputs, labels, numeric_kind(labels), int64(outputs.size))
    return _loss_of_elements("square_evaluate", outputs, arguments, 1 / outputs.shape[1])


def _loss_of_rows(name: str, outputs: Array, arguments: tuple[Any, ...], width: int, scale: float) -> Array:
    grid, block = team_grid(outputs)
    return _loss(name, outputs, grid, block, arguments, width, scale)


def _loss_of_elements(name: str, outputs: Array, arguments: tuple[Any, ...], scale: float) -> Array:
    return _loss(name, outputs, (blocks(outputs.size, THREADS), 1), (THREADS, 1), arguments, 1, scale)


def _loss(
    name: str, outputs: Array, grid: Pair, block: Pair, arguments: tuple[Any, ...], width: int, scale: float
) -> Array:
    """Launch blocks that write ``width`` sums each, and a kernel that adds them and scales the first sum."""
    parts = empty((grid[0], width), np.float64)
    begin("loss", named(name, outputs), grid, block, (*arguments, parts))
    sums = empty((2,) if width == 2 else (), np.float64)
    begin("sum", "add_parts", (1, 1), (THREADS, 1), (parts, int32(grid[0]), int32(width), np.float64(scale), sums))
    return sums


# Batches, sums and types.


def take(stored: Array, indices: Array, scale: float, out: Array) -> None:
    """Set out[i] = scale * stored[indices[i]], row by row, converted to out's type."""
    rows, columns = out.shape
    if stored.dtype == np.bool_:
        stored = stored.view(np.uint8)
    arguments = (stored, indices, int64(rows), int32(columns), out.dtype.type(scale), out)
    cells("batch", f"take_{stored.dtype.name}", out, rows, -(-columns // 4), arguments)


def sum_rows(rows: Array, order: Array, start: int, stop: int, scale: float, out: Array) -> None:
    """Set out = scale * (rows[order[0]] + rows[order[1]] + ...)[start:stop], added in that order."""
    length = rows.shape[1]
    first = rows.reshape(-1)[start:]
    arguments = (int64(stop - start), first, int64(length), order, int32(order.size), out.dtype.type(scale), out)
    flat("sum", "sum_rows", out, stop - start, arguments)


def cast(x: Array, y: Array) -> None:
    """Set ``y`` to ``x``, rounded to nearest; one of them is float32, the other float16 or bfloat16."""
    packs = -(-x.size // 8)
    if packs:
        name = named(named("cast", x), y)
        begin("cast", name, (blocks(packs, THREADS), 1), (THREADS, 1), (int64(x.size), x, y))


def transpose(x: Array, y: Array) -> None:
    """Set ``y`` to the transpose of the matrix ``x``; types as for ``cast``, or both float32."""
    rows, columns = x.shape
    grid = -(-columns // WARP), -(-rows // WARP)
    begin("cast", named(named("transpose", x), y), grid, (WARP, LINES), (x, int32(rows), int32(columns), y))
