"""Compilation of element kernels under common rules, and sums of rows.

Numba compiles kernels at first use; ``KernelCache`` stores them, so that only the first run on a machine waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, event
from numba.extending import intrinsic

from . import activity
from .kernel_cache import KernelCache
from .layout import Array

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger(__name__)
_COMPILE = activity.KINDS.index("compile")

_REORDER = {"reassoc", "contract", "arcp", "nsz"}


def kernel(function: F) -> F:
    """Compile a function of arrays and scalars; it releases the GIL and rounds according to IEEE 754.

    An element's result does not depend on its position in a vector. A run is therefore bit-identical for every division
    of its vectors. Scalars arrive as Python floats: convert them with ``x.dtype.type(value)`` in the kernel, or float32
    arithmetic is promoted to float64.
    """
    # Pass False explicitly: a kernel compiled without the option inherits it from the first kernel that calls it.
    return _compile(function, False)


def reduction(function: F) -> F:
    """Compile like ``kernel``, but allow sums in any order, which vectorization needs.

    NaN and infinity in the sum are preserved, so that divergence is detected. Test for them in a ``kernel``: here
    ``x - x`` may be folded to zero.
    """
    return _compile(function, _REORDER)


class _Listener(event.Listener):  # type: ignore[misc]
    """Marks and times compilations, and logs the first one. Kernels loaded from the cache are not compiled."""

    seconds = 0.0
    _logged, _depth, _began = False, 0, 0.0

    def on_start(self, event: object) -> None:
        activity.enter(_COMPILE)
        if self._depth == 0:
            self._began = time.perf_counter()
        self._depth += 1  # a kernel that calls another kernel compiles it, too
        if not self._logged:
            self._logged = True
            _log.info("compiling kernels for this machine and model type; this takes up to a minute, once")

    def on_end(self, event: object) -> None:
        activity.leave()
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._began


_listener = _Listener()
event.register("numba:compile", _listener)


def compile_seconds() -> float:
    """Return the seconds that this process has spent on compiling kernels."""
    return _listener.seconds


def _compile(function: F, fastmath: bool | set[str]) -> F:
    compiled: Any = numba.njit(nogil=True, fastmath=fastmath, error_model="numpy")(function)
    compiled._cache = KernelCache(function)
    return cast(F, compiled)


@intrinsic
def prefetch(typing_context: Any, row: Any, index: Any) -> Any:
    """In a kernel: prefetch the cache line of ``row[index]``; ``row`` is 1-D and C-contiguous."""

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
    """Set out = scale * (rows[order[0]] + rows[order[1]] + ...)[start:stop], added in that order; see ``sum_tree``.

    ``out``, shape (stop - start,), must not overlap ``rows``: compiled loops over overlapping arrays do not vectorize.
    """
    n = order.size
    factor = out.dtype.type(scale)
    if order[n - 1] < 0:
        _sum_tree(rows, order, start, stop, out)
        for i in range(out.size):
            out[i] = factor * out[i]
        return
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


@kernel
def _sum_tree(rows: Array, order: Array, start: int, stop: int, out: Array) -> None:
    """Set ``out`` to the sum by a tree; ``order`` is in postfix notation."""
    # A tree of n rows needs at most log2(n) + 1 partial sums; ``out`` is the first one.
    stack = np.empty((_depth(order) - 1, out.size), out.dtype)
    top, place, n = -1, 0, order.size
    while place < n:
        word = order[place]
        place += 1
        if word < 0:
            top -= 1
            _add(stack[top - 1] if top else out, stack[top])
        elif place < n and order[place] < 0:  # a row that is added at once need not be copied
            place += 1
            _add(stack[top - 1] if top else out, rows[word, start:stop])
        else:
            top += 1
            _copy(stack[top - 1] if top else out, rows[word, start:stop])


@kernel
def _depth(order: Array) -> int:
    """Return the largest number of partial sums at a time."""
    depth = most = 0
    for word in order:
        depth += 1 if word >= 0 else -1
        most = max(depth, most)
    return most


@kernel
def _add(total: Array, x: Array) -> None:
    for i in range(total.size):
        total[i] += x[i]


@kernel
def _copy(out: Array, x: Array) -> None:
    for i in range(out.size):
        out[i] = x[i]


_BLOCK = 4096  # elements summed at a time: the sum of a block stays in the L1 cache


@kernel
def sum_in_place(rows: Array, order: Array, lo: int, hi: int, scale: float, row: int) -> None:
    """Set rows[row][lo:hi] = scale * (rows[order[0]] + rows[order[1]] + ...)[lo:hi], added in that order.

    ``row`` must be in ``order``.
    """
    if order.size == 2:
        # Addition commutes, so the bits are the same. Without a copy the vector is read only once.
        factor = rows.dtype.type(scale)
        total, other = rows[row, lo:hi], rows[order[0] + order[1] - row, lo:hi]
        for i in range(total.size):
            total[i] = factor * (total[i] + other[i])
        return
    scratch = np.empty(_BLOCK, rows.dtype)
    for start in range(lo, hi, _BLOCK):
        stop = min(start + _BLOCK, hi)
        block, target = scratch[: stop - start], rows[row, start:stop]
        sum_rows(rows, order, start, stop, scale, block)
        for i in range(target.size):  # target[:] = block compiles to a slow generic copy
            target[i] = block[i]
