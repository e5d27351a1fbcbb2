"""Element kernels on the device: each function has the name and the arguments of the Numba form that it stands for.

Arrays are those of the device, C-contiguous; nothing here waits for it. So what is a Python number in the Numba form is
here a float64 array, of shape () or (2,), which the caller reads when it has to.

A result is the same bits at every run, and on every GPU for which the compiler makes the same code: sums are taken in
an order that depends on shapes alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ..params import Array, Shape

Pair = tuple[int, int]

THREADS = 256
WARP = 32
LINES = THREADS // WARP
_BLOCKS = 132 * 8  # all that the largest GPU, an H100, has running at once; more would only begin later
_PARTS = 264  # blocks that share a sum over rows: each leaves a part, which one more kernel adds
_CHUNK = 2048  # as in optim.cu
_TEAM_COLUMNS = 1024  # longer rows are worked on by a whole block

_REALS = {"float32": "float", "float64": "double"}
_KINDS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64")
_RULES = ("sgd", "momentum", "nesterov", "adam", "adagrad", "rmsprop")  # in the order of optim/rules.py


class Kernels(Protocol):
    """Where kernels run."""

    def empty(self, shape: Shape, dtype: Any) -> Array:
        """Memory of the device, with anything in it."""

    def launch(self, source: str, name: str, grid: Pair, block: Pair, arguments: tuple[Any, ...]) -> None:
        """Start a kernel of ``kernels/<source>.cu``; scalars among ``arguments`` have the exact types it takes."""


_kernels: Kernels


def use(kernels: Kernels) -> None:
    """Have every launch in this process go to ``kernels``; local."""
    global _kernels
    _kernels = kernels


# nn/activation.py


def relu(x: Array, y: Array) -> None:
    _elements("relu", x, y)


def relu_in_place(x: Array) -> None:
    _elements("relu", x, x)


def relu_backward(y: Array, dy: Array) -> None:
    _elements("relu_backward", y, dy)


def leaky_relu(x: Array, values: Array, slope: float, out: Array) -> None:
    """``values``, times ``slope`` where ``x`` is not positive."""
    _elements("leaky_relu", x, values, out.dtype.type(slope), out)


def gelu(x: Array, phi: Array, y: Array) -> None:
    _elements("gelu", x, phi, y)


def gelu_backward(x: Array, phi: Array, dy: Array) -> None:
    _elements("gelu_backward", x, phi, dy)


def tanh_backward(y: Array, dy: Array) -> None:
    _elements("tanh_backward", y, dy)


def sigmoid(x: Array, y: Array) -> None:
    """``y`` holds ``exp(-abs(x))`` and becomes the sigmoid of x."""
    _elements("sigmoid", x, y)


def sigmoid_backward(y: Array, dy: Array) -> None:
    _elements("sigmoid_backward", y, dy)


# nn/dense.py


def take_rows(weight: Array, rows: Array, y: Array) -> None:
    """``rows``: of any type of number; NaN for those outside [0, len(weight))."""
    sizes = _whole(rows.size), _whole(len(weight)), _int(weight.shape[1])
    _cells("embedding", "take_rows", y, rows.size, y.shape[1], (weight, rows, _kind(rows), *sizes, y))


def add_rows(dy: Array, rows: Array, weight_grad: Array) -> None:
    """Set ``weight_grad``; added in the order of the batch. Takes time with len(weight_grad) * rows.size / 32."""
    vocabulary, features = weight_grad.shape
    sizes = _whole(rows.size), _whole(vocabulary), _int(features)
    packs = -(-features * weight_grad.itemsize // 16)
    _cells("embedding", "add_rows", weight_grad, vocabulary, packs, (dy, rows, _kind(rows), *sizes, weight_grad))


# nn/pool.py


def max_pool(x: Array, size: int, stride: int, y: Array, place: Array) -> None:
    """``place`` is the position in its window, row by row, that each maximum came from."""
    _pool("max_pool", x, y, y, (x, *_pooled(x, size, stride, y), _whole(len(x)), y, place))


def max_pool_2(x: Array, stride: int, y: Array, place: Array) -> None:
    """``max_pool`` for a size of 2."""
    max_pool(x, 2, stride, y, place)


def max_pool_backward(dy: Array, place: Array, size: int, stride: int, dx: Array) -> None:
    _pool("max_pool_backward", dx, dy, dx, (dy, place, *_pooled(dx, size, stride, dy), _whole(len(dx)), dx))


def average_pool(x: Array, size: int, stride: int, y: Array) -> None:
    share = y.dtype.type(1 / (size * size))
    _pool("average_pool", x, y, y, (x, *_pooled(x, size, stride, y), _whole(len(x)), share, y))


def average_pool_backward(dy: Array, size: int, stride: int, dx: Array) -> None:
    share = dx.dtype.type(1 / (size * size))
    _pool("average_pool_backward", dx, dy, dx, (dy, *_pooled(dx, size, stride, dy), _whole(len(dx)), share, dx))


# nn/windows.py


def copy_windows(x: Array, start: int, down: int, right: int, height: int, width: int, windows: Array) -> None:
    """``windows[n, i, j]`` has its corner at ``x[n, (start + i) * down, j * right]``; here for any number of images."""
    batch, lines, columns = windows.shape[:3]
    geometry = _windows(x, start, down, right, height, width, windows)
    arguments = (x, *geometry, _whole(batch), windows)
    _cells("windows", "copy_windows", windows, batch * lines * columns, height * width * x.shape[3], arguments)


def add_windows(windows: Array, start: int, down: int, right: int, height: int, width: int, x: Array) -> None:
    """Add windows where ``copy_windows`` takes them from."""
    geometry = _windows(x, start, down, right, height, width, windows)
    batch, lines, columns, channels = x.shape
    _cells("windows", "add_windows", x, batch * lines, columns * channels, (windows, *geometry, _whole(batch), x))


# nn/dropout.py


def drop(x: Array, y: Array, seed: int, layer: int, position: int, below: int, scale: float) -> None:
    """``y = x * scale`` where an element's 32 random bits are under ``below``, 0 elsewhere."""
    bits = tuple(np.uint64(word) for word in (seed, layer, position, below))
    rows, columns = x.shape
    _cells("dropout", "drop", y, rows, columns, (x, y, _whole(rows), _int(columns), *bits, x.dtype.type(scale)))


# nn/normalize.py


def moment_sums(x: Array, sums: Array) -> None:
    """``sums``, shape (2 * features + 1,), is the columns' sums, those of their squares, and the row count."""
    features = x.shape[1]
    _sum_columns("moment_sums", x, (x,), sums[: 2 * features])
    sums[2 * features :] = len(x)


def normalize(x: Array, center: Array, inverse: Array, scale: Array, shift: Array, y: Array) -> None:
    arguments = (x, center, inverse, scale, shift, _whole(x.size), _int(x.shape[1]), y)
    _flat("normalize", "normalize", y, x.size, arguments)


def gradient_sums(x: Array, center: Array, inverse: Array, dy: Array, sums: Array) -> None:
    """``sums[0]`` is the columns' sums of dy, ``sums[1]`` those of dy times the normalized x."""
    _sum_columns("gradient_sums", x, (x, center, inverse, dy), sums)


def normalize_backward(x: Array, center: Array, inverse: Array, scale: Array, means: Array, dy: Array) -> None:
    """Turn ``dy`` into the gradient of x, given the means of what ``gradient_sums`` sums."""
    arguments = (x, center, inverse, scale, means, _whole(x.size), _int(x.shape[1]), dy)
    _flat("normalize", "normalize_backward", dy, x.size, arguments)


def layer_norm(x: Array, eps: float, scale: Array, shift: Array, normal: Array, inverse: Array, y: Array) -> None:
    rows, columns = x.shape
    sizes = _whole(rows), _int(columns)
    _teams("normalize", "layer_norm", y, (x, y.dtype.type(eps), scale, shift, *sizes, normal, inverse, y))


def layer_norm_backward(normal: Array, inverse: Array, scale: Array, dy: Array, sums: Array) -> None:
    """Turn ``dy`` into the gradient of x; ``sums`` are those of dy, and of dy times ``normal``, over rows."""
    rows, columns = dy.shape
    _sum_columns("layer_gradient_sums", dy, (normal, dy), sums)
    _teams("normalize", "layer_norm_backward", dy, (normal, inverse, scale, _whole(rows), _int(columns), dy))


# nn/loss.py. Where the Numba form returns the loss, or the loss and the number right, these return an array of them.


def softmax_gradient(outputs: Array, labels: Array, weight: float, gradient: Array) -> Array:
    rows, classes = outputs.shape
    arguments = (outputs, labels, _kind(labels), _whole(rows), _int(classes), outputs.dtype.type(weight), gradient)
    return _loss_of_rows("softmax_gradient", outputs, arguments, 1, weight)


def softmax_evaluate(outputs: Array, labels: Array) -> Array:
    rows, classes = outputs.shape
    arguments = (outputs, labels, _kind(labels), _whole(rows), _int(classes))
    return _loss_of_rows("softmax_evaluate", outputs, arguments, 2, 1.0)


def sigmoid_gradient(outputs: Array, labels: Array, weight: float, gradient: Array) -> Array:
    share = weight / outputs.shape[1]
    factor = outputs.dtype.type(share)
    arguments = (outputs, labels, _kind(labels), _whole(outputs.size), factor, gradient)
    return _loss_of_elements("sigmoid_gradient", outputs, arguments, share)


def sigmoid_evaluate(outputs: Array, labels: Array) -> Array:
    rows, columns = outputs.shape
    arguments = (outputs, labels, _kind(labels), _whole(rows), _int(columns))
    return _loss_of_rows("sigmoid_evaluate", outputs, arguments, 2, 1 / columns)


def square_gradient(outputs: Array, labels: Array, weight: float, gradient: Array) -> Array:
    share = weight / outputs.shape[1]
    slope = outputs.dtype.type(2 * weight / outputs.shape[1])
    arguments = (outputs, labels, _kind(labels), _whole(outputs.size), slope, gradient)
    return _loss_of_elements("square_gradient", outputs, arguments, share)


def square_evaluate(outputs: Array, labels: Array) -> Array:
    arguments = (outputs, labels, _kind(labels), _whole(outputs.size))
    return _loss_of_elements("square_evaluate", outputs, arguments, 1 / outputs.shape[1])


# optim/rules.py


def update_segments(
    rule: int,
    constants: tuple[float, float, float, float],
    segments: Array,
    scales: Array,
    l2: Array,
    shrink: Array,
    rows: Array,
    order: Array,
    origin: int,
    params: Array,
    slot0: Array,
    slot1: Array,
    average: Array,
    follow: float,
    scratch: Array | None = None,
) -> None:
    """Update params, slots and average on every segment, all in one pass; segments ascend and do not overlap.

    The arguments are those of ``rules.update_segments``; ``scratch`` is not used.
    """
    arguments = (
        *(np.float64(value) for value in constants),
        *(segments, _int(len(segments)), scales, l2, shrink),
        *(rows, _whole(rows.shape[1]), order, _int(order.size), _whole(origin), _whole(params.size)),
        *(params, _or_null(slot0), _or_null(slot1), _or_null(average), np.float64(follow)),
    )
    if len(segments):
        _start(
            "optim", _named(f"update_segments_{_RULES[rule]}", params), (_chunks(params), 1), (THREADS, 1), arguments
        )


def measure_segments(
    directed: bool,
    normed: bool,
    constants: tuple[float, float, float, float],
    segments: Array,
    decay: Array,
    rows: Array,
    order: Array,
    own: Array,
    params: Array,
    slot0: Array,
    slot1: Array,
    sums: Array,
    scratch: Array | None = None,
) -> None:
    """Write each segment's gradient, or Adam's direction where ``directed``, to ``own``; sum its squares.

    The arguments are those of ``rules.measure_segments``; ``scratch`` is not used.
    """
    if not len(segments):
        return
    parts = _kernels.empty((-(-params.size // _CHUNK) + len(segments), 2), np.float64)
    arguments = (
        *(np.float64(value) for value in constants),
        *(segments, _int(len(segments)), decay, rows, _whole(rows.shape[1]), order, _int(order.size)),
        *(own, _whole(params.size), params, _or_null(slot0), _or_null(slot1), parts),
    )
    name = _named("measure_directions" if directed else "measure_gradients", params)
    _start("optim", name, (_chunks(params), 1), (THREADS, 1), arguments)
    _start("optim", "sum_segments", (len(segments), 1), (THREADS, 1), (segments, _int(normed), parts, sums))


# data/loader.py


def take(stored: Array, numbers: Array, scale: float, out: Array) -> None:
    """out[i] = scale * stored[numbers[i]], row by row, converted to out's type."""
    rows, columns = out.shape
    if stored.dtype == np.bool_:
        stored = stored.view(np.uint8)
    arguments = (stored, numbers, _whole(rows), _int(columns), out.dtype.type(scale), out)
    _cells("batch", f"take_{stored.dtype.name}", out, rows, -(-columns // 4), arguments)


# kernels.py


def sum_rows(rows: Array, order: Array, start: int, stop: int, scale: float, out: Array) -> None:
    """out = scale * (rows[order[0]] + rows[order[1]] + ...)[start:stop], added in that order."""
    length = rows.shape[1]
    first = rows.reshape(-1)[start:]
    arguments = (_whole(stop - start), first, _whole(length), order, _int(order.size), out.dtype.type(scale), out)
    _flat("sum", "sum_rows", out, stop - start, arguments)


# No Numba form: for products on tensor cores.


def to_bfloat16(x: Array, y: Array) -> None:
    """``y`` is ``x``, float32, rounded to bfloat16, as whose bits it has uint16."""
    packs = -(-x.size // 4)
    if packs:
        _start("cast", "to_bfloat16", (_blocks(packs, THREADS), 1), (THREADS, 1), (_whole(x.size), x, y))


# How a grid is laid over what there is to do.


def _elements(name: str, *arguments: Any) -> None:
    """One thread for a pack of elements; the last of ``arguments`` is written."""
    out = arguments[-1]
    _flat("activation", name, out, out.size, (_whole(out.size), *arguments))


def _flat(source: str, name: str, typed: Array, n: int, arguments: tuple[Any, ...]) -> None:
    """A line of threads for ``n`` elements, a pack of 16 bytes each."""
    if n:
        packs = -(-n * typed.itemsize // 16)
        _start(source, _named(name, typed), (_blocks(packs, THREADS), 1), (THREADS, 1), arguments)


def _cells(source: str, name: str, typed: Array, rows: int, columns: int, arguments: tuple[Any, ...]) -> None:
    """A warp for 32 neighbouring columns of a row, or more where there are many."""
    if rows and columns:
        down = _blocks(rows, LINES)
        across = max(1, min(_BLOCKS // down, -(-columns // WARP)))
        _start(source, _named(name, typed), (down, across), (WARP, LINES), arguments)


def _teams(source: str, name: str, matrix: Array, arguments: tuple[Any, ...]) -> None:
    """A warp for a row, or a block for a long one."""
    if len(matrix):
        grid, block = _team_grid(matrix)
        _start(source, _named(name, matrix), grid, block, arguments)


def _team_grid(matrix: Array) -> tuple[Pair, Pair]:
    rows, columns = matrix.shape
    if columns > _TEAM_COLUMNS:
        return (_blocks(rows, 1), 1), (THREADS, 1)
    return (_blocks(rows, LINES), 1), (WARP, LINES)


def _blocks(work: int, at_once: int) -> int:
    return max(1, min(_BLOCKS, -(-work // at_once)))


def _chunks(params: Array) -> int:
    return _blocks(params.size, _CHUNK)


def _pool(name: str, images: Array, pooled: Array, target: Array, arguments: tuple[Any, ...]) -> None:
    """A cell for an element of ``target``."""
    assert images.shape[0] == pooled.shape[0] and images.shape[3] == pooled.shape[3]
    batch, lines, columns, channels = target.shape
    _cells("pool", name, target, batch * lines, columns * channels, arguments)


def _pooled(images: Array, size: int, stride: int, pooled: Array) -> tuple[np.int32, ...]:
    return tuple(map(np.int32, (*images.shape[1:], *pooled.shape[1:3], size, stride)))


def _windows(
    x: Array, start: int, down: int, right: int, height: int, width: int, windows: Array
) -> tuple[np.int32, ...]:
    return tuple(map(np.int32, (*x.shape[1:], start, down, right, height, width, *windows.shape[1:])))


def _sum_columns(name: str, matrix: Array, inputs: tuple[Array, ...], sums: Array) -> None:
    """Two sums for each column, in ``sums``: blocks leave those of their rows, and one more kernel adds them."""
    rows, columns = matrix.shape
    tiles = -(-columns // WARP)
    shares = max(1, min(_PARTS, _BLOCKS // tiles, -(-rows // (4 * LINES))))
    parts = _kernels.empty((shares, 2 * columns), np.float64)
    sizes = _whole(rows), _int(columns)
    _start("normalize", _named(name, matrix), (tiles, shares), (WARP, LINES), (*inputs, *sizes, parts))
    counts = _int(shares), _int(2 * columns)
    _start("sum", "add_columns", (-(-2 * columns // WARP), 1), (WARP, LINES), (parts, *counts, sums))


def _loss_of_rows(name: str, outputs: Array, arguments: tuple[Any, ...], width: int, scale: float) -> Array:
    grid, block = _team_grid(outputs)
    return _loss(name, outputs, grid, block, arguments, width, scale)


def _loss_of_elements(name: str, outputs: Array, arguments: tuple[Any, ...], scale: float) -> Array:
    return _loss(name, outputs, (_blocks(outputs.size, THREADS), 1), (THREADS, 1), arguments, 1, scale)


def _loss(
    name: str, outputs: Array, grid: Pair, block: Pair, arguments: tuple[Any, ...], width: int, scale: float
) -> Array:
    """Blocks leave ``width`` sums each, and one more kernel adds them; the first is multiplied by ``scale``."""
    parts = _kernels.empty((grid[0], width), np.float64)
    _start("loss", _named(name, outputs), grid, block, (*arguments, parts))
    sums = _kernels.empty((2,) if width == 2 else (), np.float64)
    _start("sum", "add_parts", (1, 1), (THREADS, 1), (parts, _int(grid[0]), _int(width), np.float64(scale), sums))
    return sums


def _start(source: str, name: str, grid: Pair, block: Pair, arguments: tuple[Any, ...]) -> None:
    for argument in arguments:
        assert not hasattr(argument, "flags") or argument.flags.c_contiguous, f"{name} takes C-contiguous arrays"
    _kernels.launch(source, name, grid, block, arguments)


def _named(name: str, typed: Array) -> str:
    return f"{name}_{_REALS[typed.dtype.name]}"


def _kind(numbers: Array) -> np.int32:
    """Which type of number, as common.cuh counts them; a bool is stored as a uint8."""
    return np.int32(_KINDS.index("uint8" if numbers.dtype == np.bool_ else numbers.dtype.name))


def _or_null(vector: Array) -> Array | np.uint64:
    """A null pointer for an empty vector, whose own pointer may be any."""
    return vector if vector.size else np.uint64(0)


def _int(value: int) -> np.int32:
    assert value < 2**31
    return np.int32(value)


def _whole(value: int) -> np.int64:
    return np.int64(value)
