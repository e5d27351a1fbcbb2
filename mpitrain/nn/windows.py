"""Windows of images as rows of a matrix (im2col), in blocks.

Chellapilla, Puri and Simard, High performance convolutional neural networks for document processing, IWFHR 2006.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from ..core.layout import Array, Shape

Padding = Literal["same", "valid"] | int


class Axis(NamedTuple):
    """One spatial axis of images: ``windows`` of ``size``, ``stride`` apart, over the padded length."""

    length: int
    size: int
    stride: int
    before: int
    after: int
    windows: int

    @classmethod
    def lay(cls, length: int, size: int, stride: int, padding: Padding) -> Axis:
        """Place the windows; ``windows`` is less than 1 if none fits."""
        if padding == "same":
            windows = -(-length // stride)
            total = max(0, (windows - 1) * stride + size - length)
            return cls(length, size, stride, total // 2, total - total // 2, windows)
        pad = 0 if padding == "valid" else padding
        return cls(length, size, stride, pad, pad, (length + 2 * pad - size) // stride + 1)

    @property
    def padded(self) -> int:
        return self.before + self.length + self.after

    @property
    def inside(self) -> slice:
        """Range of the image in the padded axis."""
        return slice(self.before, self.before + self.length)


class Grid(NamedTuple):
    """The positions of windows on images of one size."""

    rows: Axis
    columns: Axis
    channels: int

    @property
    def window_size(self) -> int:
        return self.rows.size * self.columns.size * self.channels

    @property
    def is_padded(self) -> bool:
        return self.rows.padded > self.rows.length or self.columns.padded > self.columns.length

    def images_shape(self, images: int) -> Shape:
        return images, self.rows.length, self.columns.length, self.channels

    def padded_shape(self, images: int) -> Shape:
        return images, self.rows.padded, self.columns.padded, self.channels

    def inside(self, padded: Array) -> Array:
        """Return the images without their padding."""
        return padded[:, self.rows.inside, self.columns.inside]

    def image_blocks(self, batch: int, block: int) -> Iterator[slice]:
        """Yield ranges of images whose windows fit a block of this many elements, at least one image each."""
        return _slices(batch, block // (self.rows.windows * self.columns.windows * self.window_size))

    def row_blocks(self, block: int) -> Iterator[slice]:
        """Yield ranges of rows of an image's windows that fit a block of this many elements, at least one row each."""
        return _slices(self.rows.windows, block // (self.columns.windows * self.window_size))

    def span(self, images: slice, rows: slice) -> slice:
        """Return the range of a block's windows among the batch's windows; the block has all rows or one image."""
        start = (images.start * self.rows.windows + rows.start) * self.columns.windows
        return slice(start, start + (images.stop - images.start) * (rows.stop - rows.start) * self.columns.windows)

    def copy(self, ops: Any, padded: Array, rows: slice, matrix: Array) -> None:
        """Copy the windows of some rows of images to the rows of ``matrix``.

        Args:
            ops: The operations of the arrays' device.
            padded: Shape ``padded_shape(images)``.
            rows: Rows of windows, the same for every image.
            matrix: Shape (windows, at least window_size); values beyond a window are not changed.
        """
        ops.copy_windows(padded, rows.start, *self._steps, self._by_place(matrix, rows))

    def add(self, ops: Any, matrix: Array, rows: slice, padded: Array) -> None:
        """Add windows to the elements that ``copy`` reads: the transpose of ``copy``."""
        ops.add_windows(self._by_place(matrix, rows), rows.start, *self._steps, padded)

    @property
    def _steps(self) -> tuple[int, int, int, int]:
        return self.rows.stride, self.columns.stride, self.rows.size, self.columns.size

    def _by_place(self, matrix: Array, rows: slice) -> Array:
        return matrix.reshape(-1, rows.stop - rows.start, self.columns.windows, matrix.shape[1])


def _slices(length: int, step: int) -> Iterator[slice]:
    step = max(1, step)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
