"""Convolution as matrix products over blocks of windows that stay in cache."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import Any, Literal, NamedTuple

import numpy as np

from ..errors import JobError
from ..kernels import kernel
from ..params import Array, Shape
from .arguments import positive, wrong_shape
from .init import he_normal, zeros
from .layer import Context, Initializer, Layer

# A block's windows are written and then read by a product: half of a common 1 MiB L2 holds both sides.
BLOCK_BYTES = 1 << 19

Padding = Literal["same", "valid"] | int


class _Axis(NamedTuple):
    """One spatial axis: its length, zeros before and after it, and the number of windows along it."""

    length: int
    before: int
    after: int
    windows: int

    @property
    def padded(self) -> int:
        return self.before + self.length + self.after

    @property
    def inside(self) -> slice:
        """Where the image lies in the padded axis."""
        return slice(self.before, self.before + self.length)


class Conv2D(Layer):
    """Cross-correlation of images (height, width, in_channels) with ``filters`` kernels, plus a bias.

    The windows of a few images at a time are laid out as the rows of a matrix (im2col) and multiplied by
    the weight. The matrix is computed again in backward: that is cheaper than keeping it in memory.

    Chellapilla, Puri and Simard, High performance convolutional neural networks for document processing,
    IWFHR 2006.

    Args:
        in_channels: Channels of an image.
        filters: Channels of an output.
        kernel: Side of the square window, or (height, width).
        stride: Step of the window, or (down, right).
        padding: ``same`` adds the zeros that make an output ceil(length / stride) long, the odd one at the
            end; ``valid`` adds none; an integer adds as many at each of the four sides.
        bias: Whether to add a bias.
        weight_init: Initial values of ``weight``, shape (height, width, in_channels, filters).
        name: Overrides the name that the model would give.
    """

    weight: Array
    weight_grad: Array
    bias: Array
    bias_grad: Array

    def __init__(
        self,
        in_channels: int,
        filters: int,
        kernel: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: Padding = "same",
        bias: bool = True,
        weight_init: Initializer = he_normal,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.in_channels = positive(self, "in_channels", in_channels)
        self.filters = positive(self, "filters", filters)
        self.kernel = _pair(self, "kernel", kernel)
        self.stride = _pair(self, "stride", stride)
        self.padding = _padding(padding)
        self.has_bias = bias
        self.weight_init = weight_init

    def build(self, shape: Shape) -> Shape:
        if len(shape) != 3 or shape[2] != self.in_channels:
            hint = (
                f"make in_channels {shape[2]}" if len(shape) == 3 else "put Reshape(height, width, channels) before it"
            )
            raise wrong_shape(self, ("height", "width", self.in_channels), shape, hint)
        self._rows, self._columns = (self._axis(i, shape[i]) for i in (0, 1))
        if min(self._rows.windows, self._columns.windows) < 1:
            raise JobError(
                f"Conv2D: kernel {self.kernel} is larger than the image {shape[:2]} with padding "
                f"{self.padding!r}; make it smaller or pad more"
            )
        self.declare("weight", (*self.kernel, self.in_channels, self.filters), self.weight_init)
        if self.has_bias:
            self.declare("bias", (self.filters,), zeros)
        return (self._rows.windows, self._columns.windows, self.filters)

    def forward(self, x: Array, ctx: Context) -> Array:
        self._x = np.ascontiguousarray(x)
        weight = self.weight.reshape(-1, self.filters)
        y = self.buffer("y", (len(x), self._rows.windows, self._columns.windows, self.filters))
        for images in self._image_blocks(len(x)):
            padded = self._padded(self._x[images])
            for rows in self._row_blocks():
                block = y[images, rows].reshape(-1, self.filters)
                np.matmul(self._windows(padded, rows), weight, out=block)
                if self.has_bias:
                    _add_bias(self.bias, block)  # while the block is in cache
        return y

    def backward(self, dy: Array) -> Array | None:
        dy = np.ascontiguousarray(dy)
        dx = self.buffer("dx", self._x.shape) if self.needs_dx else None
        self.weight_grad[...] = 0
        if self.has_bias:
            self.bias_grad[...] = 0
        for images in self._image_blocks(len(dy)):
            padded = self._padded(self._x[images])
            padded_grad = None if dx is None else self.buffer("padded_grad", padded.shape)
            if padded_grad is not None:
                padded_grad[...] = 0
            for rows in self._row_blocks():
                block = dy[images, rows].reshape(-1, self.filters)
                windows = self._windows(padded, rows)
                self._add_gradients(windows, block)
                if padded_grad is not None:
                    self._add_input_gradient(block, windows, rows, padded_grad)
            if dx is not None and padded_grad is not None:
                dx[images] = padded_grad[:, self._rows.inside, self._columns.inside]
        return dx

    def _axis(self, i: int, length: int) -> _Axis:
        size, stride = self.kernel[i], self.stride[i]
        if self.padding == "same":
            windows = -(-length // stride)
            total = max(0, (windows - 1) * stride + size - length)
            return _Axis(length, total // 2, total - total // 2, windows)
        pad = 0 if self.padding == "valid" else self.padding
        return _Axis(length, pad, pad, (length + 2 * pad - size) // stride + 1)

    @property
    def _window_size(self) -> int:
        return self.kernel[0] * self.kernel[1] * self.in_channels

    def _image_blocks(self, batch: int) -> Iterator[slice]:
        """As many whole images as fit a block, at least one."""
        nbytes = self._rows.windows * self._columns.windows * self._window_size * self.dtype.itemsize
        return _slices(batch, max(1, BLOCK_BYTES // nbytes))

    def _row_blocks(self) -> Iterator[slice]:
        """As many rows of an image's windows as fit a block, at least one."""
        nbytes = self._columns.windows * self._window_size * self.dtype.itemsize
        return _slices(self._rows.windows, max(1, BLOCK_BYTES // nbytes))

    def _padded(self, x: Array) -> Array:
        """``x``, shape (images, height, width, channels), with its border of zeros."""
        if self._rows.padded == self._rows.length and self._columns.padded == self._columns.length:
            return x
        shape = len(x), self._rows.padded, self._columns.padded, self.in_channels
        padded = self.buffer("padded", shape)
        padded[...] = 0
        padded[:, self._rows.inside, self._columns.inside] = x
        return padded

    def _windows(self, padded: Array, rows: slice) -> Array:
        """The windows of some rows, shape (windows, window size): a buffer that the next call overwrites."""
        matrix = self.buffer(
            "windows", (len(padded) * (rows.stop - rows.start) * self._columns.windows, self._window_size)
        )
        _copy_windows(padded, rows.start, *self.stride, self._by_row(matrix, rows))
        return matrix

    def _by_row(self, windows: Array, rows: slice) -> Array:
        """``windows`` by image, row, column, and row inside the window."""
        height, width = self.kernel
        return windows.reshape(-1, rows.stop - rows.start, self._columns.windows, height, width * self.in_channels)

    def _add_gradients(self, windows: Array, dy: Array) -> None:
        weight_grad = self.buffer("weight_grad", (self._window_size, self.filters))
        np.matmul(windows.T, dy, out=weight_grad)
        total = self.weight_grad.reshape(weight_grad.shape)
        np.add(total, weight_grad, out=total)
        if self.has_bias:
            _add_rows(dy, self.bias_grad)

    def _add_input_gradient(self, dy: Array, windows: Array, rows: slice, padded_grad: Array) -> None:
        """Overwrites ``windows``, which have been used, with their gradient."""
        np.matmul(dy, self.weight.reshape(-1, self.filters).T, out=windows)
        _add_windows(self._by_row(windows, rows), rows.start, *self.stride, padded_grad)


def _pair(layer: Layer, name: str, value: Any) -> tuple[int, int]:
    both = value if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
    return positive(layer, name, both[0]), positive(layer, name, both[1])


def _padding(value: Any) -> Padding:
    if value == "same" or value == "valid":
        return value
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise JobError(f"Conv2D: padding is {value!r}; give 'same', 'valid' or an integer of at least 0")
    return int(value)


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


# The innermost loops of both kernels run along a row of a window, whose channels lie one after the other
# both in the image and in the matrix. They index views that start there: an index computed from several
# variables could be negative for all that Numba knows, and would not vectorize.


@kernel
def _copy_windows(x: Array, start: int, down: int, right: int, windows: Array) -> None:
    """Lay out windows: ``windows[n, i, j]`` has its corner at ``x[n, (start + i) * down, j * right]``.

    Args:
        x: Shape (images, height, width, channels).
        start: Which row of windows comes first.
        down: Vertical step of the windows.
        right: Horizontal step of the windows.
        windows: Shape (images, rows, columns, window height, window width * channels).
    """
    images, rows, columns, height, width = windows.shape
    step = right * x.shape[3]
    lines = x.reshape((x.shape[0], x.shape[1], x.shape[2] * x.shape[3]))
    for n in range(images):
        for i in range(rows):
            for k in range(height):
                line = lines[n, (start + i) * down + k]
                for j in range(columns):
                    source, target = line[j * step :], windows[n, i, j, k]
                    for c in range(width):
                        target[c] = source[c]


@kernel
def _add_windows(windows: Array, start: int, down: int, right: int, x: Array) -> None:
    """Add every window where it came from: the transpose of ``_copy_windows``."""
    images, rows, columns, height, width = windows.shape
    step = right * x.shape[3]
    lines = x.reshape((x.shape[0], x.shape[1], x.shape[2] * x.shape[3]))
    for n in range(images):
        for i in range(rows):
            for k in range(height):
                line = lines[n, (start + i) * down + k]
                for j in range(columns):
                    target, source = line[j * step :], windows[n, i, j, k]
                    for c in range(width):
                        target[c] += source[c]


@kernel
def _add_bias(bias: Array, rows: Array) -> None:
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            rows[i, j] += bias[j]


@kernel
def _add_rows(rows: Array, total: Array) -> None:
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            total[j] += rows[i, j]
