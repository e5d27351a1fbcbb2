"""How element kernels are compiled, by one decorator, so that every kernel has the same rules; and their sum.

Kernels are compiled by Numba at first use and cached beside the package (or in the user's cache directory
where that is not writable), so that only the first run on a machine waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

from .params import Array

F = TypeVar("F", bound=Callable[..., Any])

# Sums may be reordered, so that they vectorize. NaN and infinity keep their meaning (no nnan, no ninf):
# a diverging run must be seen to diverge.
_MATH = {"reassoc", "contract", "arcp", "nsz"}


def kernel(function: F) -> F:
    """Compile a function of arrays and scalars; it runs without the interpreter lock.

    Scalars arrive as Python floats: inside, ``x.dtype.type(value)`` makes them the arrays' type, without
    which float32 arithmetic would be widened to float64.
    """
    compiled: Any = numba.njit(cache=True, nogil=True, fastmath=_MATH, error_model="numpy", boundscheck=False)(function)
    return compiled  # type: ignore[no-any-return]


@kernel
def sum_rows(rows: Array, start: int, stop: int, scale: float, out: Array) -> None:
    """out = scale * (rows[0] + rows[1] + ...)[start:stop], added in that order.

    ``out``, shape (stop - start,), must not lie in ``rows``: compiled loops over arrays that overlap do not
    vectorize, even where they would be right.
    """
    n = rows.shape[0]
    factor = out.dtype.type(scale)
    if n == 1:
        a = rows[0, start:stop]
        for i in range(out.size):
            out[i] = factor * a[i]
        return
    one = out.dtype.type(1)
    first = factor if n == 2 else one
    a, b = rows[0, start:stop], rows[1, start:stop]
    for i in range(out.size):
        out[i] = first * (a[i] + b[i])
    for r in range(2, n):
        then = factor if r == n - 1 else one
        c = rows[r, start:stop]
        for i in range(out.size):
            out[i] = then * (out[i] + c[i])
