"""Kernels that make batches, sum vectors and convert types."""

from __future__ import annotations

import numpy as np

from ...core.layout import Array
from .grid import LINES, THREADS, WARP, begin, blocks, cells, flat, int32, int64, named

# data/loader.py


def take(stored: Array, numbers: Array, scale: float, out: Array) -> None:
    """Set out[i] = scale * stored[numbers[i]], row by row, converted to out's type."""
    rows, columns = out.shape
    if stored.dtype == np.bool_:
        stored = stored.view(np.uint8)
    arguments = (stored, numbers, int64(rows), int32(columns), out.dtype.type(scale), out)
    cells("batch", f"take_{stored.dtype.name}", out, rows, -(-columns // 4), arguments)


# core/kernels.py


def sum_rows(rows: Array, order: Array, start: int, stop: int, scale: float, out: Array) -> None:
    """Set out = scale * (rows[order[0]] + rows[order[1]] + ...)[start:stop], added in that order."""
    length = rows.shape[1]
    first = rows.reshape(-1)[start:]
    arguments = (int64(stop - start), first, int64(length), order, int32(order.size), out.dtype.type(scale), out)
    flat("sum", "sum_rows", out, stop - start, arguments)


# Conversions between float32 and 16-bit types; there are no Numba versions.


def cast(x: Array, y: Array) -> None:
    """Set ``y`` to ``x``, rounded to nearest; one of them is float32. uint16 holds bfloat16."""
    packs = -(-x.size // 8)
    if packs:
        name = named(named("cast", x), y)
        begin("cast", name, (blocks(packs, THREADS), 1), (THREADS, 1), (int64(x.size), x, y))


def transpose(x: Array, y: Array) -> None:
    """Set ``y`` to the transpose of the matrix ``x``; types as for ``cast``, or both float32."""
    rows, columns = x.shape
    grid = -(-columns // WARP), -(-rows // WARP)
    begin("cast", named(named("transpose", x), y), grid, (WARP, LINES), (x, int32(rows), int32(columns), y))
