"""Convolutions with 3 x 3 filters on the CPU, with fewer multiplications than products of windows.

Winograd's minimal filtering F(2 x 2, 3 x 3): a tile of 2 x 2 outputs takes 16 multiplications for each channel of the
images and of the outputs instead of 36. The images and the filters are transformed to 16 matrices each, and the
products of these matrices are transformed to the outputs. Lavin and Gray, Fast algorithms for convolutional neural
networks, CVPR 2016, section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .convolution import Convolution, ConvolutionShape
from .kernels import kernel
from .layout import Array, Shape

_FILTER_TRANSFORM = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])  # G in the paper
# A block's transformed images and products are written and then read again. Measured with 1 MiB of L2: smaller blocks
# are multiplied more slowly, larger ones do not stay in cache. With many channels, products of few tiles are slow.
_BLOCK_BYTES, _MIN_BLOCK_TILES = 3 << 19, 96
_MIN_CHANNELS = 16  # with fewer channels, the transforms take longer than the multiplications that they save


class WinogradConvolutions:
    """Plans convolutions on the CPU."""

    def plan(self, shape: ConvolutionShape, dtype: np.dtype[Any], needs_dx: bool) -> Convolution:
        """Return the operations on images of type ``dtype`` that are faster than products of windows; may be none."""
        filters, *size, channels = shape.filters
        is_small = min(filters, channels) < _MIN_CHANNELS
        if size != [3, 3] or shape.stride != (1, 1) or is_small or dtype not in (np.float32, np.float64):
            return Convolution()
        winograd = Winograd(shape, dtype)
        return Convolution(winograd.forward, winograd.data_gradient, winograd.filter_gradient, dtype, filters_last=True)


class Winograd:
    """A convolution with 3 x 3 filters and stride 1.

    ``weight`` and ``weight_grad`` have the shape (3, 3, channels of the images, channels of the outputs).

    Args:
        shape: The shapes of the arrays.
        dtype: The data type of the arrays, float32 or float64.
    """

    def __init__(self, shape: ConvolutionShape, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._padding = shape.padding[0][0], shape.padding[1][0]
        self._filter_transform = np.kron(_FILTER_TRANSFORM, _FILTER_TRANSFORM).astype(dtype)  # shape (16, 9)
        tile_bytes = 16 * (shape.images[3] + shape.outputs[3]) * dtype.itemsize
        self._block_tiles = max(_MIN_BLOCK_TILES, _BLOCK_BYTES // tile_bytes)
        self._memory: dict[str, Array] = {}

    def forward(self, x: Array, weight: Array, y: Array) -> None:
        matrices = self._filter_transform @ weight.reshape(9, -1)
        self._convolve(x, matrices.reshape(16, *weight.shape[2:]), self._padding, y)

    def data_gradient(self, dy: Array, weight: Array, dx: Array) -> None:
        """Convolve ``dy`` with the filters turned by 180 degrees."""
        channels, filters = weight.shape[2:]
        turned = weight.reshape(9, channels, filters).transpose(0, 2, 1)[::-1]
        matrices = self._filter_transform @ turned.reshape(9, -1)
        above, before = self._padding
        self._convolve(dy, matrices.reshape(16, filters, channels), (2 - above, 2 - before), dx)

    def filter_gradient(self, x: Array, dy: Array, weight_grad: Array) -> None:
        channels, filters = weight_grad.shape[2:]
        total, product = (self._buffer(name, (16, channels, filters)) for name in ("total", "product"))
        total[...] = 0
        for images, first, tiles in self._blocks(dy):
            inputs = self._buffer("inputs", (16, *tiles, channels))
            gradients = self._buffer("products", (16, *tiles, filters))
            transform_images(x[images], first, *self._padding, inputs)
            transform_gradients(dy[images], first, gradients)
            np.matmul(_matrices(inputs).transpose(0, 2, 1), _matrices(gradients), out=product)
            total += product
        np.matmul(self._filter_transform.T, total.reshape(16, -1), out=weight_grad.reshape(9, -1))

    def _convolve(self, x: Array, matrices: Array, padding: tuple[int, int], y: Array) -> None:
        """Set ``y`` to the convolution of ``x``.

        Args:
            x: Images.
            matrices: The transformed filters, shape (16, channels of ``x``, channels of ``y``).
            padding: Lines of zeros above an image, and columns of zeros before it.
            y: Outputs.
        """
        for images, first, tiles in self._blocks(y):
            inputs = self._buffer("inputs", (16, *tiles, x.shape[3]))
            products = self._buffer("products", (16, *tiles, y.shape[3]))
            transform_images(x[images], first, *padding, inputs)
            np.matmul(_matrices(inputs), matrices, out=_matrices(products))
            transform_products(products, first, y[images])

    def _blocks(self, y: Array) -> Iterator[tuple[slice, int, Shape]]:
        """Yield each block's images, its first row of tiles, and its numbers of images, rows and columns of tiles.

        A block consists of whole images, or of rows of tiles of one image.
        """
        rows, columns = -(-y.shape[1] // 2), -(-y.shape[2] // 2)
        block_images = max(1, self._block_tiles // (rows * columns))
        block_rows = min(rows, max(1, self._block_tiles // columns))
        for start in range(0, len(y), block_images):
            images = slice(start, min(start + block_images, len(y)))
            for first in range(0, rows, block_rows):
                yield images, first, (images.stop - start, min(block_rows, rows - first), columns)

    def _buffer(self, name: str, shape: Shape) -> Array:
        """Return an array in memory that is reused: new arrays would cost page faults."""
        size = math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or memory.size < size:
            memory = self._memory[name] = np.empty(size, self._dtype)
        return memory[:size].reshape(shape)


def _matrices(tiles: Array) -> Array:
    return tiles.reshape(16, -1, tiles.shape[4])


# The kernels transform along the columns of an image, one line at a time, and along its lines. A line's even and odd
# columns are separated, so that the loops of the transforms are long. A loop sets two arrays at most: with more arrays,
# the compiled loop is slower, because it first tests whether they overlap.


@kernel
def transform_images(x: Array, first: int, above: int, before: int, tiles: Array) -> None:
    """Transform squares of 4 x 4 points of images; neighbours overlap by two lines or columns.

    Args:
        x: Images, shape (images, height, width, channels).
        first: The row of tiles at which ``tiles`` starts. The square of the first tile of row i starts at line 2 * i.
        above: Lines of zeros above an image; may be negative. Points below an image are zeros, too.
        before: Columns of zeros before an image; may be negative. Points after a line are zeros, too.
        tiles: Results, shape (16, images, rows of tiles, columns of tiles, channels).
    """
    height, width, channels = x.shape[1:]
    images, rows, columns = tiles.shape[1:4]
    results = tiles.reshape((16, images, rows, columns * channels))
    halves = np.zeros((2, columns + 1, channels), x.dtype)  # even and odd columns
    even, odd = halves[0].reshape(-1), halves[1].reshape(-1)
    lines = np.empty((4, 4, columns * channels), x.dtype)  # the last four lines, transformed; line i is at i % 4
    for n in range(images):
        for i in range(rows):
            for line in range(2 * i if i == 0 else 2 * i + 2, 2 * i + 4):
                source_line, result = 2 * first + line - above, lines[line % 4]
                if 0 <= source_line < height:
                    for j in range(max(0, before), min(2 * columns + 2, width + before)):
                        source, target = x[n, source_line, j - before], halves[j % 2, j // 2]
                        for c in range(channels):
                            target[c] = source[c]
                    _transform_points(
                        even, odd, even[channels:], odd[channels:], result[0], result[1], result[2], result[3]
                    )
                else:
                    result[:] = 0
            a, b, c, d = lines[2 * i % 4], lines[(2 * i + 1) % 4], lines[(2 * i + 2) % 4], lines[(2 * i + 3) % 4]
            for k in range(4):
                y0, y1, y2, y3 = results[k, n, i], results[4 + k, n, i], results[8 + k, n, i], results[12 + k, n, i]
                _transform_points(a[k], b[k], c[k], d[k], y0, y1, y2, y3)


@kernel
def _transform_points(x0: Array, x1: Array, x2: Array, x3: Array, y0: Array, y1: Array, y2: Array, y3: Array) -> None:
    for i in range(y0.size):
        y0[i] = x0[i] - x2[i]
        y1[i] = x1[i] + x2[i]
    for i in range(y2.size):
        y2[i] = x2[i] - x1[i]
        y3[i] = x1[i] - x3[i]


@kernel
def transform_products(tiles: Array, first: int, y: Array) -> None:
    """Set the outputs of some rows of tiles.

    Args:
        tiles: Products, shape (16, images, rows of tiles, columns of tiles, channels).
        first: The row of tiles at which ``tiles`` starts. The outputs of a tile of row i start at line 2 * i.
        y: Outputs, shape (images, height, width, channels).
    """
    images, rows, columns, channels = tiles.shape[1:]
    products = tiles.reshape((16, images, rows, columns * channels))
    lines = np.empty((2, 4, columns * channels), y.dtype)
    halves = np.empty((2, columns, channels), y.dtype)
    even, odd = halves[0].reshape(-1), halves[1].reshape(-1)
    for n in range(images):
        for i in range(rows):
            for k in range(4):
                x0, x1, x2, x3 = products[k, n, i], products[4 + k, n, i], products[8 + k, n, i], products[12 + k, n, i]
                _sum_products(x0, x1, x2, x3, lines[0, k], lines[1, k])
            start = 2 * (first + i)
            for line in range(start, min(start + 2, y.shape[1])):
                x0, x1, x2, x3 = lines[line % 2, 0], lines[line % 2, 1], lines[line % 2, 2], lines[line % 2, 3]
                _sum_products(x0, x1, x2, x3, even, odd)
                for j in range(y.shape[2]):
                    source, target = halves[j % 2, j // 2], y[n, line, j]
                    for c in range(channels):
                        target[c] = source[c]


@kernel
def _sum_products(x0: Array, x1: Array, x2: Array, x3: Array, y0: Array, y1: Array) -> None:
    for i in range(y0.size):
        y0[i] = x0[i] + x1[i] + x2[i]
        y1[i] = x1[i] - x2[i] - x3[i]


@kernel
def transform_gradients(dy: Array, first: int, tiles: Array) -> None:
    """Set ``tiles`` to the gradient of the products: the transpose of ``transform_products``, with its arguments."""
    images, rows, columns, channels = tiles.shape[1:]
    gradients = tiles.reshape((16, images, rows, columns * channels))
    lines = np.empty((2, 4, columns * channels), dy.dtype)
    halves = np.zeros((2, columns, channels), dy.dtype)
    even, odd = halves[0].reshape(-1), halves[1].reshape(-1)
    for n in range(images):
        for i in range(rows):
            for k in range(2):
                line, result = 2 * (first + i) + k, lines[k]
                if line < dy.shape[1]:
                    for j in range(dy.shape[2]):
                        source, target = dy[n, line, j], halves[j % 2, j // 2]
                        for c in range(channels):
                            target[c] = source[c]
                    _spread_gradients(even, odd, result[0], result[1], result[2], result[3])
                else:
                    result[:] = 0
            for k in range(4):
                y0, y1 = gradients[k, n, i], gradients[4 + k, n, i]
                y2, y3 = gradients[8 + k, n, i], gradients[12 + k, n, i]
                _spread_gradients(lines[0, k], lines[1, k], y0, y1, y2, y3)


@kernel
def _spread_gradients(x0: Array, x1: Array, y0: Array, y1: Array, y2: Array, y3: Array) -> None:
    for i in range(y0.size):
        y0[i] = x0[i]
        y1[i] = x0[i] + x1[i]
    for i in range(y2.size):
        y2[i] = x0[i] - x1[i]
        y3[i] = -x1[i]
