"""Compilation of element kernels under common rules, and sums of rows.

Numba compiles kernels at first use; ``KernelCache`` stores them, so that only the first run on a machine waits.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np

from . import deferral
from .layout import Array

F = TypeVar("F", bound=Callable[..., Any])

_COMPILER = f"{__package__}.compiler"

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


class Deferred:
    """A kernel, or a function for kernels, that is made when it is first used."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    @cached_property
    def real(self) -> Any:
        """The kernel or function."""
        return self._make(importlib.import_module(_COMPILER))

    def __call__(self, *arguments: Any) -> Any:
        return self.real(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def compile_seconds() -> float:
    """Return the seconds that this process has spent on compiling kernels."""
    compiler = sys.modules.get(_COMPILER)
    return compiler.listener.seconds if compiler is not None else 0.0


def _made(make: Callable[[Any], Any]) -> Any:
    """Return what ``make`` returns for the module of the compiler, now or when it is used."""
    return Deferred(make) if deferral.is_deferred else make(importlib.import_module(_COMPILER))


def _compile(function: F, fastmath: bool | set[str]) -> F:
    return cast(F, _made(lambda compiler: compiler.compile_kernel(function, fastmath)))


prefetch: Callable[[Any, Any], None] = _made(lambda compiler: compiler.prefetch)


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
