"""Operations on the GPU: the operations of ``core.ops``, with equal signatures.

Operations of optimizers are in ``updates``. Arrays are C-contiguous device arrays, and no function waits for the
device. Results that the CPU's operations return as Python numbers are float64 arrays of shape () or (2,), which the
caller reads when needed.

The order of sums depends only on shapes (see ``grid``). Results are therefore bit-identical in every run, and on every
GPU for which the compiler generates the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...core.layout import Array
from ...core.ops.activations import ACTIVATIONS, find_kind as _find_kind
from .grid import (
    KINDS as KINDS,
    LINES,
    SUM_BLOCKS,
    THREADS,
    WARP,
    Kernel as Kernel,
    Kernels as Kernels,
    Pair as Pair,
    add_columns,
    begin,
    cells,
    empty,
    flat,
    int32,
    int64,
    kernel,
    line,
    numeric_kind,
    or_null,
    pack_tiles,
    packs_of,
    real,
    rows_of_packs,
    shares,
    sum_columns,
    team_grid,
    teams,
    use as use,
)

# Activations.


def activate(
    x: Array, kind: str, slope: float, in_place: bool, buffer: Callable[..., Array]
) -> tuple[Array, Array | None]:
    """Return an activation of ``x``, and the array that ``activate_backward`` needs; see ``core.ops``."""
    if kind == "none":
        return x, None
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
    sizes = int64(len(product)), int32(product.shape[1])
    arguments = (product, bias, _number(kind), real(y)(slope), *sizes, y)
    rows_of_packs("activation", "add_bias", product, 16 // y.itemsize, arguments)
    return y, _kept(product, kind, y)


def add_bias_backward(kept: Array | None, kind: str, slope: float, dy: Array, bias_grad: Array) -> None:
    """Replace ``dy`` with the gradient of the product, and set the gradient of the bias."""
    rows, columns = dy.shape
    tiles, block = pack_tiles(dy, 16 // dy.itemsize)
    shared = shares(rows, 4 * block[1], tiles)
    parts = empty((shared, columns), np.float64)
    sizes = int64(rows), int32(columns)
    arguments = (or_null(kept), _number(kind), real(dy)(slope), *sizes, dy, parts, bias_grad)
    begin(kernel("activation", "add_bias_backward", dy), (tiles, shared), block, arguments)
    if shared > 1:
        add_columns(parts, bias_grad)


def _output(x: Array, kind: str, in_place: bool, buffer: Callable[..., Array]) -> Array:
    return x if in_place and kind != "gelu" else buffer("activated", x.shape)


def _kept(x: Array, kind: str, y: Array) -> Array | None:
    """Return the array that backward needs: x for GELU, None without activation, else y."""
    return None if kind == "none" else x if kind == "gelu" else y


def _number(kind: str) -> np.int32:
    _find_kind(kind)
    return _NUMBERS[kind]


_NUMBERS = {kind: int32(number) for number, kind in enumerate(ACTIVATIONS)}


# Embedding.


def take_rows(weight: Array, rows: Array, y: Array) -> None:
    """Set ``y`` to rows of ``weight``; ``rows`` has any numeric type, indices outside [0, len(weight)) give NaN."""
    sizes = int64(rows.size), int64(len(weight)), int32(weight.shape[1])
    cells("embedding", "take_rows", y, rows.size, y.shape[1], (weight, rows, numeric_kind(rows), *sizes, y))


def add_rows(dy: Array, rows: Array, weight_grad: Array) -> None:
    """Set ``weight_grad``, summing in the order of the batch, in O(len(weight_grad) * rows.size / 32) time."""
    vocabulary, features = weight_grad.shape
    sizes = int64(rows.size), int64(vocabulary), int32(features)
    packs = -(-features * weight_grad.itemsize // 16)
    cells("embedding", "add_rows", dy, vocabulary, packs, (dy, rows, numeric_kind(rows), *sizes, weight_grad))


# Pooling.


def max_pool(x: Array, size: int, stride: int, y: Array, place: Array) -> None:
    """Set ``y`` to the windows' maxima, and ``place`` to the index of each maximum in its window, row by row."""
    _by_lines("max_pool", y, y.shape[3], (x, *_pooled(x, size, stride, y), y, place))


def max_pool_backward(dy: Array, place: Array, size: int, stride: int, dx: Array) -> None:
    _by_lines("max_pool_backward", dx, dx.shape[3], (dy, place, *_pooled(dx, size, stride, dy), dx))


def average_pool(x: Array, size: int, stride: int, y: Array) -> None:
    share = real(y)(1 / (size * size))
    _by_lines("average_pool", y, y.shape[3], (x, *_pooled(x, size, stride, y), share, y))


def average_pool_backward(dy: Array, size: int, stride: int, dx: Array) -> None:
    share = real(dx)(1 / (size * size))
    _by_lines("average_pool_backward", dx, dx.shape[3], (dy, *_pooled(dx, size, stride, dy), share, dx))


# Windows of images as rows of a matrix.


def copy_windows(x: Array, start: int, down: int, right: int, height: int, width: int, windows: Array) -> None:
    """Copy windows: ``windows[n, i, j]`` has its corner at ``x[n, (start + i) * down, j * right]``, for all images."""
    geometry = _windows(x, start, down, right, height, width, windows)
    run = width * x.shape[3]  # values of a window's line, which are adjacent in the image, too
    _by_lines("copy_windows", windows, run, (x, int32(windows.shape[3]), *geometry, windows))


def add_windows(windows: Array, start: int, down: int, right: int, height: int, width: int, x: Array) -> None:
    """Add windows to the elements of ``x`` from which ``copy_windows`` copies them."""
    geometry = _windows(x, start, down, right, height, width, windows)
    _by_lines("add_windows", x, x.shape[3], (windows, int32(windows.shape[3]), *geometry, x))


def _by_lines(name: str, target: Array, values: int, arguments: tuple[Any, ...]) -> None:
    """Launch ``cells`` for the lines of ``target``; each of a line's elements has ``values`` adjacent values."""
    batch, lines, columns, _ = target.shape
    assert batch * lines < 2**31
    cells("windows", name, target, batch * lines, columns * packs_of(values, 16 // target.itemsize), arguments)


def _pooled(images: Array, size: int, stride: int, pooled: Array) -> tuple[np.generic, ...]:
    assert images.shape[3] == pooled.shape[3]
    return _windows(images, 0, stride, stride, size, size, pooled)


def _windows(
    images: Array, start: int, down: int, right: int, height: int, width: int, windows: Array
) -> tuple[np.generic, ...]:
    """Return the geometry that windows.cu expects, and the number of images."""
    assert len(images) == len(windows)
    numbers = (*images.shape[1:], start, down, right, height, width, *windows.shape[1:3])
    return *map(int32, numbers), int64(len(images))


# Dropout.


def drop(x: Array, y: Array, seed: int, layer: int, position: Array, below: int, scale: float) -> None:
    """Set ``y = x * scale`` for elements whose 32 random bits are below ``below``, else 0.

    Args:
        position: Shape (1,), uint64.
    """
    rows, columns = x.shape
    packs = -(-columns * x.itemsize // 16)
    words = np.uint64(seed), np.uint64(layer), position, np.uint64(below)
    cells("dropout", "drop", y, rows, packs, (x, y, int64(rows), int32(columns), *words, real(x)(scale)))


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
    begin(kernel("normalize", "moments", x), (tiles, shared), (WARP, LINES), (x, int64(rows), int32(columns), parts))
    arguments = (x, parts, int32(shared), int32(columns), result)
    begin(kernel("normalize", "merge_moments", x), (tiles, 1), (WARP, LINES), arguments)


def normalize(x: Array, center: Array, inverse: Array, scale: Array, shift: Array, y: Array) -> None:
    """Set ``y = (x - center) * inverse * scale + shift``; ``center`` has shape (2, features), others (features,)."""
    arguments = (x, center, inverse, scale, shift, int64(len(x)), int32(x.shape[1]), y)
    rows_of_packs("normalize", "normalize", x, _normalized_at_once(x), arguments)


def gradient_sums(x: Array, center: Array, inverse: Array, dy: Array, sums: Array) -> None:
    """Set ``sums[0]`` to the columns' sums of dy, ``sums[1]`` to the sums of dy times the normalized x."""
    sum_columns("gradient_sums", x, _normalized_at_once(x), (x, center, inverse, dy), sums)


def normalize_backward(x: Array, center: Array, inverse: Array, scale: Array, means: Array, dy: Array) -> None:
    """Replace ``dy`` with the gradient of x, given the means of the sums of ``gradient_sums``."""
    arguments = (x, center, inverse, scale, means, int64(len(x)), int32(x.shape[1]), dy)
    rows_of_packs("normalize", "normalize_backward", x, _normalized_at_once(x), arguments)


def layer_norm(x: Array, eps: float, scale: Array, shift: Array, normal: Array, inverse: Array, y: Array) -> None:
    rows, columns = x.shape
    sizes = int64(rows), int32(columns)
    teams("normalize", "layer_norm", y, (x, real(y)(eps), scale, shift, *sizes, normal, inverse, y))


def layer_norm_backward(normal: Array, inverse: Array, scale: Array, dy: Array, sums: Array) -> None:
    """Replace ``dy`` with the gradient of x; ``sums`` are the sums over rows of dy and of dy times ``normal``."""
    rows, columns = dy.shape
    sum_columns("layer_gradient_sums", dy, _normalized_at_once(dy), (normal, dy), sums)
    teams("normalize", "layer_norm_backward", dy, (normal, inverse, scale, int64(rows), int32(columns), dy))


def _normalized_at_once(x: Array) -> int:
    """Return the number of adjacent columns that a thread handles, as in normalize.cu."""
    return min(4, 16 // x.itemsize)


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
    grid, block = team_grid(outputs, SUM_BLOCKS)
    return _loss(name, outputs, grid, block, arguments, width, scale)


def _loss_of_elements(name: str, outputs: Array, arguments: tuple[Any, ...], scale: float) -> Array:
    grid = max(1, min(SUM_BLOCKS, -(-outputs.size // THREADS))), 1
    return _loss(name, outputs, grid, (THREADS, 1), arguments, 1, scale)


def _loss(
    name: str, outputs: Array, grid: Pair, block: Pair, arguments: tuple[Any, ...], width: int, scale: float
) -> Array:
    """Launch blocks that write ``width`` sums each, and a kernel that adds them and scales the first sum."""
    parts = empty((grid[0], width), np.float64)
    begin(kernel("loss", name, outputs), grid, block, (*arguments, parts))
    sums = empty((2,) if width == 2 else (), np.float64)
    arguments = (parts, int32(grid[0]), int32(width), np.float64(scale), sums)
    begin(kernel("sum", "add_parts", sums), (1, 1), (THREADS, 1), arguments)
    return sums


# Batches, sums and types.


def take(stored: Array, indices: Array, scale: float, out: Array) -> None:
    """Set out[i] = scale * stored[indices[i]], row by row, converted to out's type."""
    rows, columns = out.shape
    arguments = (stored, numeric_kind(stored), indices, int64(rows), int32(columns), real(out)(scale), out)
    cells("batch", "take", out, rows, -(-columns // 4), arguments)


def sum_rows(rows: Array, order: Array, start: int, stop: int, scale: float, out: Array) -> None:
    """Set out = scale * (rows[order[0]] + rows[order[1]] + ...)[start:stop], in an order as in ``core.sum_tree``."""
    length = rows.shape[1]
    first = rows.reshape(-1)[start:]
    arguments = (int64(stop - start), first, int64(length), order, int32(order.size), out.dtype.type(scale), out)
    flat("sum", "sum_rows", out, stop - start, arguments)


def cast(x: Array, y: Array) -> None:
    """Set ``y`` to ``x``, rounded to nearest. One array is float32, the other is float16 or bfloat16."""
    line(_cast("cast", x, y), -(-x.size // 8), THREADS, (int64(x.size), x, y))


def transpose(x: Array, y: Array) -> None:
    """Set ``y`` to the transpose of the matrix ``x``; types as for ``cast``, or both float32."""
    rows, columns = x.shape
    grid = -(-columns // WARP), -(-rows // WARP)
    begin(_cast("transpose", x, y), grid, (WARP, LINES), (x, int32(rows), int32(columns), y))


def _cast(name: str, x: Array, y: Array) -> Kernel:
    is_from_float = x.dtype == np.float32
    return kernel("cast", f"{name}_from_float" if is_from_float else f"{name}_to_float", y if is_from_float else x)
