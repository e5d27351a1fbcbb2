"""Those that make batches and sums, and round."""

from __future__ import annotations

import numpy as np

from ...params import Array
from .grid import THREADS, begin, blocks, cells, flat, int32, int64

# data/loader.py


def take(stored: Array, numbers: Array, scale: float, out: Array) -> None:
    """out[i] = scale * stored[numbers[i]], row by row, converted to out's type."""
    rows, columns = out.shape
    if stored.dtype == np.bool_:
        stored = stored.view(np.uint8)
    arguments = (stored, numbers, int64(rows), int32(columns), out.dtype.type(scale), out)
    cells("batch", f"take_{stored.dtype.name}", out, rows, -(-columns // 4), arguments)


# kernels.py


def sum_rows(rows: Array, order: Array, start: int, stop: int, scale: float, out: Array) -> None:
    """out = scale * (rows[order[0]] + rows[order[1]] + ...)[start:stop], added in that order."""
    length = rows.shape[1]
    first = rows.reshape(-1)[start:]
    arguments = (int64(stop - start), first, int64(length), order, int32(order.size), out.dtype.type(scale), out)
    flat("sum", "sum_rows", out, stop - start, arguments)


# No Numba form: for products on tensor cores.


def to_bfloat16(x: Array, y: Array) -> None:
    """``y`` is ``x``, float32, rounded to bfloat16, as whose bits it has uint16."""
    packs = -(-x.size // 4)
    if packs:
        begin("cast", "to_bfloat16", (blocks(packs, THREADS), 1), (THREADS, 1), (int64(x.size), x, y))
