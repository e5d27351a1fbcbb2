"""Batches from stored examples, rows of a table by index, and conversion of types."""

from __future__ import annotations

import numpy as np

from ..kernels import kernel, prefetch
from ..layout import Array

_ROWS_AHEAD = 4  # prefetch distance in rows; distances from 2 to 16 perform equally well


@kernel
def take(stored: Array, indices: Array, scale: float, out: Array) -> None:
    """Set out[i] = scale * stored[indices[i]] row by row, converted to out's type."""
    factor = out.dtype.type(scale)
    line = max(1, 64 // stored.itemsize)
    for i in range(indices.size):
        if i + _ROWS_AHEAD < indices.size:  # without this, cache misses take half of the time
            ahead = stored[indices[i + _ROWS_AHEAD]]
            for j in range(0, ahead.size, line):
                prefetch(ahead, j)  # type: ignore[call-arg]
        source, target = stored[indices[i]], out[i]
        for j in range(target.size):
            target[j] = factor * out.dtype.type(source[j])


def cast(x: Array, y: Array) -> None:
    """Set ``y`` to ``x``, rounded to its type."""
    y[...] = x


def transpose(x: Array, y: Array) -> None:
    """Set ``y`` to the transpose of the matrix ``x``, rounded to its type."""
    y[...] = x.T


@kernel
def take_rows(weight: Array, rows: Array, y: Array) -> None:
    """Set y[i] = weight[rows[i]]; ``rows`` has any numeric type, and indices outside [0, len(weight)) give NaN."""
    for i in range(rows.size):
        # Compare before conversion: NaN cannot be converted.
        if rows[i] >= 0 and rows[i] < len(weight):
            y[i] = weight[int(rows[i])]
        else:
            y[i] = np.nan


@kernel
def add_rows(dy: Array, rows: Array, weight_grad: Array) -> None:
    """Set ``weight_grad`` to the sums of the rows of ``dy``, shape (rows.size, features), in the order of the batch."""
    weight_grad[:] = 0
    for i in range(rows.size):
        if rows[i] >= 0 and rows[i] < len(weight_grad):
            row = int(rows[i])
            for j in range(dy.shape[1]):
                weight_grad[row, j] += dy[i, j]
