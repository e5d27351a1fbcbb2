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

# A block of windows is written and then read by products. Measured with 1 MiB of L2: below this size the calls
# show, above it nothing is gained.
BLOCK_BYTES = 1 << 20

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
        matrix = self._matrix()
        y = self.buffer("y", (len(x), self._rows.windows, self._columns.windows, self.filters))
        for images in self._image_blocks(len(x)):
            padded = self._padded(images)
            for rows in self._row_blocks():
                windows = self._windows(images, rows)
                self._copy_windows(padded, rows, windows)
                np.matmul(windows, matrix, out=y[images, rows].reshape(-1, self.filters))
        return y

    def backward(self, dy: Array) -> Array | None:
        dy = np.ascontiguousarray(dy)
        dx = self.buffer("dx", self._x.shape) if self.needs_dx else None
        self.weight_grad[...] = 0
        if self.has_bias:
            self.bias_grad[...] = 0
        for images in self._image_blocks(len(dy)):
            padded = None if self._keeps_windows else self._padded(images)
            padded_grad = (
                None
                if dx is None
                else self.buffer(
                    "padded_grad",
                    (images.stop - images.start, self._rows.padded, self._columns.padded, self.in_channels),
                )
            )
            if padded_grad is not None:
                padded_grad[...] = 0
            for rows in self._row_blocks():
                block = dy[images, rows].reshape(-1, self.filters)
                windows = self._windows(images, rows)
                if padded is not None:
                    self._copy_windows(padded, rows, windows)
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

    def _matrix(self) -> Array:
        """The weight, shape (window size, filters), with the bias as its last row: that of a window's one."""
        weight = self.weight.reshape(-1, self.filters)
        if not self.has_bias:
            return weight
        matrix = self.buffer("matrix", (self._window_size + 1, self.filters))
        matrix[:-1] = weight
        matrix[-1] = self.bias
        return matrix

    def _image_blocks(self, batch: int) -> Iterator[slice]:
        """As many whole images as fit a block, at least one."""
        nbytes = self._rows.windows * self._columns.windows * self._window_size * self.dtype.itemsize
        return _slices(batch, max(1, BLOCK_BYTES // nbytes))

    def _row_blocks(self) -> Iterator[slice]:
        """As many rows of an image's windows as fit a block, at least one."""
        nbytes = self._columns.windows * self._window_size * self.dtype.itemsize
        return _slices(self._rows.windows, max(1, BLOCK_BYTES // nbytes))

    def _padded(self, images: slice) -> Array:
        """These images of ``x`` with their border of zeros, shape (images, rows, columns, channels)."""
        x = self._x[images]
        if self._rows.padded == self._rows.length and self._columns.padded == self._columns.length:
            return x
        padded = self.buffer("padded", (len(x), self._rows.padded, self._columns.padded, self.in_channels))
        padded[...] = 0
        padded[:, self._rows.inside, self._columns.inside] = x
        return padded

    @property
    def _keeps_windows(self) -> bool:
        """Whether all windows take less memory than the outputs: then they are kept for backward."""
        return self._window_size < self.filters

    def _windows(self, images: slice, rows: slice) -> Array:
        """Where the windows of a block are or belong: a window a row, with a one at its end for the bias."""
        window_size = self._window_size + self.has_bias
        start = (images.start * self._rows.windows + rows.start) * self._columns.windows
        count = (images.stop - images.start) * (rows.stop - rows.start) * self._columns.windows
        if self._keeps_windows:
            kept = self.buffer("windows", (len(self._x) * self._rows.windows * self._columns.windows, window_size))
            return kept[start : start + count]
        return self.buffer("windows", (count, window_size))

    def _copy_windows(self, padded: Array, rows: slice, windows: Array) -> None:
        _copy_windows(padded, rows.start, *self.stride, *self.kernel, self._by_place(windows, rows))
        if self.has_bias:
            windows[:, -1] = 1

    def _by_place(self, windows: Array, rows: slice) -> Array:
        """``windows`` as (images, rows, columns, window)."""
        return windows.reshape(-1, rows.stop - rows.start, self._columns.windows, windows.shape[1])

    def _add_gradients(self, windows: Array, dy: Array) -> None:
        grad = self.buffer("grad", (windows.shape[1], self.filters))
        np.matmul(windows.T, dy, out=grad)
        total = self.weight_grad.reshape(-1, self.filters)
        np.add(total, grad[: len(total)], out=total)
        if self.has_bias:
            np.add(self.bias_grad, grad[-1], out=self.bias_grad)

    def _add_input_gradient(self, dy: Array, windows: Array, rows: slice, padded_grad: Array) -> None:
        """Overwrites ``windows``, which have been used, with their gradient."""
        weight = self.weight.reshape(-1, self.filters)
        np.matmul(dy, weight.T, out=windows[:, : self._window_size])
        _add_windows(self._by_place(windows, rows), rows.start, *self.stride, *self.kernel, padded_grad)


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


# The innermost loops run along one row of a window, whose channels lie one after the other both in the image
# and in the matrix. They index views that start there: an index computed from several variables could be
# negative for all that Numba knows, and the loop would not vectorize.


@kernel
def _copy_windows(x: Array, start: int, down: int, right: int, height: int, width: int, windows: Array) -> None:
    """Lay out windows: ``windows[n, i, j]`` has its corner at ``x[n, (start + i) * down, j * right]``.

    Args:
        x: Shape (images, rows, columns, channels).
        start: Which row of windows comes first.
        down: Vertical step of the windows.
        right: Horizontal step of the windows.
        height: Rows of a window.
        width: Columns of a window.
        windows: Shape (images, rows, columns, at least height * width * channels).
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
def _add_windows(windows: Array, start: int, down: int, right: int, height: int, width: int, x: Array) -> None:
    """Add every window where it came from: the transpose of ``_copy_windows``."""
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
