"""Convolutions with 3 x 3 filters on the CPU, with fewer multiplications than products of windows.

Winograd's minimal filtering F(2 x 2, 3 x 3): a tile of 2 x 2 outputs takes 16 multiplications for each channel of the
images and of the outputs instead of 36. The images and the filters are transformed to 16 matrices each, and the
products of these matrices are transformed to the outputs. Lavin and Gray, Fast algorithms for convolutional neural
networks, CVPR 2016, section 4.1.

Results differ from those of windows by rounding. An infinite input causes NaN in the outputs that depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .convolution import Convolution, ConvolutionShape
from .kernels import kernel
from .layout import Array, Shape

_FILTER_TRANSFORM = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])  # G in the paper
_FILTER_TRANSFORM_2D = np.kron(_FILTER_TRANSFORM, _FILTER_TRANSFORM)  # shape (16, 9)
# Preferred bytes of a block's transformed images and products, and its minimum number of tiles. Measured on Zen 4:
# smaller matrices are multiplied more slowly, larger ones are read from a slower cache.
BLOCK_BYTES, MIN_BLOCK_TILES = 3 << 19, 96
# Below these limits, the transforms take longer than the multiplications that they save.
_MIN_CHANNELS, _MIN_TILES, _MIN_USED = 16, 48, 2 / 3


class WinogradConvolutions:
    """Plans convolutions on the CPU."""

    def plan(
        self, shape: ConvolutionShape, dtype: np.dtype[Any], needs_dx: bool, buffer: Callable[..., Array]
    ) -> Convolution:
        """Return the operations; none if products of windows are faster, or the data type is unsuitable."""
        filters, *size, channels = shape.filters
        if size != [3, 3] or shape.stride != (1, 1) or dtype not in (np.float32, np.float64):
            return Convolution()
        batch, height, width, _ = shape.outputs
        tiles = batch * max(_tiles(height, width), _tiles(*shape.images[1:3]) if needs_dx else 0)
        is_used = batch * height * width >= _MIN_USED * 4 * tiles
        if min(filters, channels) < _MIN_CHANNELS or tiles < _MIN_TILES or not is_used:
            return Convolution()
        winograd = Winograd(shape, dtype, buffer)
        return Convolution(winograd.forward, winograd.data_gradient, winograd.filter_gradient, filters_last=True)


class Winograd:
    """A convolution with 3 x 3 filters and stride 1.

    ``weight`` and ``weight_grad`` have the shape (3, 3, channels of the images, channels of the outputs).

    Args:
        shape: The shapes of the arrays.
        dtype: The data type of the arrays, float32 or float64.
        buffer: Returns memory that is kept between calls, given a tag, a shape and a data type.
    """

    def __init__(self, shape: ConvolutionShape, dtype: np.dtype[Any], buffer: Callable[..., Array]) -> None:
        self._dtype, self._buffer = dtype, buffer
        self._padding = shape.padding[0][0], shape.padding[1][0]
        self._transform = _FILTER_TRANSFORM_2D.astype(dtype)
        tile_bytes = 16 * (shape.images[3] + shape.outputs[3]) * dtype.itemsize
        self._block_tiles = max(MIN_BLOCK_TILES, BLOCK_BYTES // tile_bytes)

    def forward(self, x: Array, weight: Array, y: Array) -> None:
        filters = self._transform @ weight.reshape(9, -1)
        self._convolve(x, filters.reshape(16, *weight.shape[2:]), self._padding, y)

    def data_gradient(self, dy: Array, weight: Array, dx: Array) -> None:
        """Convolve ``dy`` with the filters, rotated by 180 degrees and with input and output channels exchanged."""
        channels, out_channels = weight.shape[2:]
        rotated = weight.reshape(9, channels, out_channels)[::-1].transpose(0, 2, 1)
        filters = self._transform @ rotated.reshape(9, -1)
        above, before = self._padding
        self._convolve(dy, filters.reshape(16, out_channels, channels), (2 - above, 2 - before), dx)

    def filter_gradient(self, x: Array, dy: Array, weight_grad: Array) -> None:
        shape = 16, *weight_grad.shape[2:]
        total = self._buffer("total", shape, self._dtype)
        for number, (images, first, tiles) in enumerate(self._blocks(dy)):
            inputs = self._tiles("inputs", tiles, x.shape[3])
            gradients = self._tiles("products", tiles, dy.shape[3])
            transform_images(x[images], first, *self._padding, inputs)
            transform_gradients(dy[images], first, gradients)
            product = self._buffer("product", shape, self._dtype) if number else total
            np.matmul(_as_matrices(inputs).transpose(0, 2, 1), _as_matrices(gradients), out=product)
            if number:
                total += product
        np.matmul(self._transform.T, total.reshape(16, -1), out=weight_grad.reshape(9, -1))

    def _convolve(self, x: Array, filters: Array, padding: tuple[int, int], y: Array) -> None:
        """Set ``y`` to the convolution of ``x``.

        Args:
            x: Images.
            filters: The transformed filters, shape (16, channels of ``x``, channels of ``y``).
            padding: Rows of zeros above an image, and columns of zeros before it.
            y: Outputs.
        """
        for images, first, tiles in self._blocks(y):
            inputs, products = self._tiles("inputs", tiles, x.shape[3]), self._tiles("products", tiles, y.shape[3])
            transform_images(x[images], first, *padding, inputs)
            np.matmul(_as_matrices(inputs), filters, out=_as_matrices(products))
            transform_products(products, first, y[images])

    def _blocks(self, y: Array) -> Iterator[tuple[slice, int, Shape]]:
        """Yield each block's images, its first row of tiles, and its numbers of images, tile rows and tile columns.

        A block consists of whole images, or of tile rows of one image.
        """
        rows, columns = -(-y.shape[1] // 2), -(-y.shape[2] // 2)
        block_images = max(1, self._block_tiles // (rows * columns))
        block_rows = min(rows, max(1, self._block_tiles // columns))
        for start in range(0, len(y), block_images):
            images = slice(start, min(start + block_images, len(y)))
            for first in range(0, rows, block_rows):
                yield images, first, (images.stop - start, min(block_rows, rows - first), columns)

    def _tiles(self, tag: str, tiles: Shape, channels: int) -> Array:
        return self._buffer(tag, (16, *tiles, channels), self._dtype)


def _tiles(height: int, width: int) -> int:
    """Return the number of tiles of an image of outputs."""
    return -(-height // 2) * -(-width // 2)


def _as_matrices(tiles: Array) -> Array:
    return tiles.reshape(16, -1, tiles.shape[4])


# Each kernel transforms every image row and then combines rows, or the reverse. The even and the odd columns of a row
# are separated, so that the loops of the transforms are long. A loop sets two arrays at most: with more arrays, the
# compiled loop is slower, because it first tests whether they overlap.


@kernel
def transform_images(x: Array, first: int, above: int, before: int, tiles: Array) -> None:
    """Transform squares of 4 x 4 points of images; neighbours overlap by two rows or columns.

    Args:
        x: Images, shape (images, height, width, channels).
        first: The tile row at which ``tiles`` starts. The squares of tile row i start at image row 2 * i - above.
        above: Rows of zeros above an image; if negative, rows are skipped. Points below an image are zeros, too.
        before: Columns of zeros before an image; if negative, columns are skipped. Points after it are zeros, too.
        tiles: Results, shape (16, images, tile rows, tile columns, channels).
    """
    height, width, channels = x.shape[1:]
    images, rows, columns = tiles.shape[1:4]
    results = tiles.reshape((16, images, rows, columns * channels))
    halves = np.zeros((2, columns + 1, channels), x.dtype)  # even and odd columns
    even, odd = halves[0].reshape(-1), halves[1].reshape(-1)
    transformed = np.empty((4, 4, columns * channels), x.dtype)  # the last four image rows; row i is at i % 4
    for n in range(images):
        for i in range(rows):
            for row in range(0 if i == 0 else 2 * i + 2, 2 * i + 4):
                source_row, result = 2 * first + row - above, transformed[row % 4]
                if 0 <= source_row < height:
                    for j in range(max(0, before), min(2 * columns + 2, width + before)):
                        source, target = x[n, source_row, j - before], halves[j % 2, j // 2]
                        for c in range(channels):
                            target[c] = source[c]
                    _transform_points(
                        even, odd, even[channels:], odd[channels:], result[0], result[1], result[2], result[3]
                    )
                else:
                    result[:] = 0
            a, b = transformed[2 * i % 4], transformed[(2 * i + 1) % 4]
            c, d = transformed[(2 * i + 2) % 4], transformed[(2 * i + 3) % 4]
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
    """Set the outputs of some tile rows.

    Args:
        tiles: Products, shape (16, images, tile rows, tile columns, channels).
        first: The tile row at which ``tiles`` starts. The outputs of tile row i start at image row 2 * i.
        y: Outputs, shape (images, height, width, channels).
    """
    images, rows, columns, channels = tiles.shape[1:]
    products = tiles.reshape((16, images, rows, columns * channels))
    transformed = np.empty((2, 4, columns * channels), y.dtype)
    halves = np.empty((2, columns, channels), y.dtype)
    even, odd = halves[0].reshape(-1), halves[1].reshape(-1)
    for n in range(images):
        for i in range(rows):
            for k in range(4):
                x0, x1, x2, x3 = products[k, n, i], products[4 + k, n, i], products[8 + k, n, i], products[12 + k, n, i]
                _sum_products(x0, x1, x2, x3, transformed[0, k], transformed[1, k])
            start = 2 * (first + i)
            for row in range(start, min(start + 2, y.shape[1])):
                sums = transformed[row % 2]
                _sum_products(sums[0], sums[1], sums[2], sums[3], even, odd)
                for j in range(y.shape[2]):
                    source, target = halves[j % 2, j // 2], y[n, row, j]
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
    transformed = np.empty((2, 4, columns * channels), dy.dtype)
    halves = np.zeros((2, columns, channels), dy.dtype)
    even, odd = halves[0].reshape(-1), halves[1].reshape(-1)
    for n in range(images):
        for i in range(rows):
            for k in range(2):
                row, result = 2 * (first + i) + k, transformed[k]
                if row < dy.shape[1]:
                    for j in range(dy.shape[2]):
                        source, target = dy[n, row, j], halves[j % 2, j // 2]
                        for c in range(channels):
                            target[c] = source[c]
                    _spread_gradients(even, odd, result[0], result[1], result[2], result[3])
                else:
                    result[:] = 0
            for k in range(4):
                y0, y1 = gradients[k, n, i], gradients[4 + k, n, i]
                y2, y3 = gradients[8 + k, n, i], gradients[12 + k, n, i]
                _spread_gradients(transformed[0, k], transformed[1, k], y0, y1, y2, y3)


@kernel
def _spread_gradients(x0: Array, x1: Array, y0: Array, y1: Array, y2: Array, y3: Array) -> None:
    for i in range(y0.size):
        y0[i] = x0[i]
        y1[i] = x0[i] + x1[i]
    for i in range(y2.size):
        y2[i] = x0[i] - x1[i]
        y3[i] = -x1[i]
