"""Draw a curve in a terminal with braille characters, each of two by four dots."""

from __future__ import annotations

import numpy as np

from ..core.layout import Array

# Bits of a character's dots, by row and column (Unicode 16.0, block 2800).
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def curve(x: Array, y: Array, width: int, height: int) -> list[str]:
    """Draw ``y`` over ``x`` into ``height`` lines of ``width`` characters; the value range fills the area.

    Args:
        x: Shape (n,), increasing.
        y: Shape (n,); non-finite values are ignored.
    """
    finite = np.isfinite(y)
    x, y = np.asarray(x, np.float64)[finite], np.asarray(y, np.float64)[finite]
    dots = np.zeros((4 * height, 2 * width), bool)
    if len(x):
        _draw(dots, x, y)
    cells = dots.reshape(height, 4, width, 2).transpose(0, 2, 1, 3) * np.array(_BITS)
    return ["".join(chr(0x2800 + bits) for bits in row) for row in cells.sum(axis=(2, 3)).tolist()]


def _draw(dots: Array, x: Array, y: Array) -> None:
    """Set the dots from the lowest to the highest value of each column, connected to the previous column."""
    rows, columns = dots.shape
    lowest, extent = y.min(), np.ptp(y)
    level = (y - lowest) / extent if extent else np.full(len(y), 0.5)
    row = np.rint((1 - level) * (rows - 1))
    column = np.rint((x - x[0]) / (np.ptp(x) or 1.0) * (columns - 1)).astype(np.int64)
    between = np.interp(np.arange(columns), column, row)
    for at in range(int(column[0]), int(column[-1]) + 1):
        in_column = row[column == at]
        reached = [between[at], *in_column, *([between[at - 1]] if at else [])]
        dots[round(min(reached)) : round(max(reached)) + 1, at] = True
