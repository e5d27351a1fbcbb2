"""Rows of a table, by index."""

from __future__ import annotations

import numpy as np

from ..kernels import kernel
from ..layout import Array


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
