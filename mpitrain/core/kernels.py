"""How element kernels are compiled, so that all have the same rules; and the sum of rows that several need.

Kernels are compiled by Numba at first use and cached beside the package (or in the user's cache directory
where that is not writable), so that only the first run on a machine waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, event
from numba.extending import intrinsic

from .layout import Array

F = TypeVar("F", bound=Callable[..., Any])

_REORDER = {"reassoc", "contract", "arcp", "nsz"}


def kernel(function: F) -> F:
    """Compile a function of arrays and scalars; it runs without the interpreter lock and rounds as IEEE 754 says.

    So an element's result does not depend on where in a vector it lies, and a run is the same bits however
    its vectors are cut. Scalars arrive as Python floats: inside, ``x.dtype.type(value)`` makes them the
    arrays' type, without which float32 arithmetic would be widened to float64.
    """
    # False has to be said: a kernel that leaves it out inherits it from the first one that calls it.
    return _compile(function, False)


def reduction(function: F) -> F:
    """Compile as ``kernel`` does, but let a sum be taken in any order, without which it would not vectorize.

    NaN and infinity keep their meaning: a diverging run must be seen to diverge.
    """
    return _compile(function, _REORDER)


def on_first_compilation(say: Callable[[str], None]) -> None:
    """Have the first compilation in this process told, for it takes seconds in which nothing else is to be seen; local.

    Kernels that come from the cache are not compiled.
    """
    event.register("numba:compile", _Listener(say))


class _Listener(event.Listener):  # type: ignore[misc]
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say: Callable[[str], None] | None = say

    def on_start(self, event: object) -> None:
        say, self._say = self._say, None
        if say is not None:
            say("compiling for this machine and this kind of model, once; it takes some seconds")

    def on_end(self, event: object) -> None:
        """Nothing to do."""


def _compile(function: F, fastmath: bool | set[str]) -> F:
    compiled: Any = numba.njit(cache=True, nogil=True, fastmath=fastmath, error_model="numpy")(function)
    return cast(F, compiled)


@intrinsic
def prefetch(typing_context: Any, row: Any, index: Any) -> Any:
    """In a kernel: have the cache line of ``row[index]`` loaded beside other work; ``row``: 1-D, C-contiguous."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        place = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = builder.bitcast(builder.gep(view.data, [place]), cgutils.voidptr_t)
        number = cgutils.int32_t
        called = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, called, "llvm.prefetch.p0")
        builder.call(function, [pointer, number(0), number(3), number(1)])  # to read, to every level, data
        return context.get_dummy_value()

    return types.void(row, index), generate


@kernel
def sum_rows(rows: Array, order: Array, start: int, stop: int, scale: float, out: Array) -> None:
    """out = scale * (rows[order[0]] + rows[order[1]] + ...)[start:stop], added in that order.

    ``out``, shape (stop - start,), must not lie in ``rows``: compiled loops over arrays that overlap do not
    vectorize, even where they would be right.
    """
    n = order.size
    factor = out.dtype.type(scale)
    if n == 1:
        a = rows[order[0], start:stop]
        for i in range(out.size):
            out[i] = factor * a[i]
        return
    one = out.dtype.type(1)
    first = factor if n == 2 else one
    a, b = rows[order[0], start:stop], rows[order[1], start:stop]
    for i in range(out.size):
        out[i] = first * (a[i] + b[i])
    for r in range(2, n):
        then = factor if r == n - 1 else one
        c = rows[order[r], start:stop]
        for i in range(out.size):
            out[i] = then * (out[i] + c[i])


_BLOCK = 4096  # elements summed at a time: the sum of a block stays in the first-level cache


@kernel
def sum_in_place(rows: Array, lo: int, hi: int, scale: float, row: int) -> None:
    """rows[row][lo:hi] = scale * (rows[0] + rows[1] + ...)[lo:hi], added in that order."""
    if len(rows) == 2:
        # Commutative, so the order is kept; and without a copy the vector passes through the core once.
        factor = rows.dtype.type(scale)
        total, other = rows[row, lo:hi], rows[1 - row, lo:hi]
        for i in range(total.size):
            total[i] = factor * (total[i] + other[i])
        return
    scratch, order = np.empty(_BLOCK, rows.dtype), np.arange(len(rows))
    for start in range(lo, hi, _BLOCK):
        stop = min(start + _BLOCK, hi)
        block, target = scratch[: stop - start], rows[row, start:stop]
        sum_rows(rows, order, start, stop, scale, block)
        for i in range(target.size):  # not target[:] = block, which compiles to a slow general copy
            target[i] = block[i]
