"""The optimizers' arithmetic: one pass over memory, block by block.

A block is small enough that its gradient, its parameters and its slots stay in the first-level cache; the
loops over a block are separate and short, for only such loops vectorize.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

from ..kernels import kernel
from ..params import Array

BLOCK = 2048  # elements: parameters, gradient and two slots of float32 fill a first-level cache of 32 KiB

# Numba cannot cache a kernel that is handed functions, so a rule is a number.
SGD, MOMENTUM, NESTEROV, ADAM, ADAGRAD, RMSPROP = range(6)

Constants = tuple[float, float, float, float]

F = TypeVar("F", bound=Callable[..., Any])


def elementwise(function: F) -> F:
    """Compile as ``kernel`` does, but round as IEEE 754 says.

    With ``kernel``'s licence to reorder and to contract, the vector loop over a block and the scalar loop
    over its remainder may round differently, and results would depend on where a vector is cut.
    """
    # fastmath=False has to be said: what is left out is inherited from the first kernel that calls this one.
    compiled: Any = numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy")(function)
    return cast(F, compiled)


@elementwise
def update_segments(
    rule: int,
    constants: Constants,
    segments: Array,
    scales: Array,
    l2: Array,
    shrink: Array,
    rows: Array,
    params: Array,
    slot0: Array,
    slot1: Array,
    average: Array,
    follow: float,
    scratch: Array,
) -> None:
    """Update params, slots and average on every segment.

    Args:
        rule: Which arithmetic, with its ``constants``.
        segments: Shape (k, 3), int64: start, stop, and 1 where trained or 0 where state.
        scales: Shape (k,), float64: the gradient is this times the sum of rows.
        l2: Shape (k,), float64: this times params is added to the gradient.
        shrink: Shape (k,), float64: params lose this part of themselves before they are updated.
        rows: Shape (n, >= size), C-contiguous: gradients, added in the order of rows.
        params, slot0, slot1, average: Shape (size,), of one dtype; empty where there is none.
        follow: The part of the way that ``average`` goes towards params.
        scratch: Shape (BLOCK,).
    """
    for s in range(segments.shape[0]):
        for start in range(segments[s, 0], segments[s, 1], BLOCK):
            stop = min(start + BLOCK, segments[s, 1])
            # Slices, so that the inner loops count from zero: only those vectorize.
            p, a, g = params[start:stop], average[start:stop], scratch[: stop - start]
            _sum_rows(rows, start, stop, scales[s], g)
            if segments[s, 2] == 0:
                _add_scaled(p, 1.0, g)
                a[:] = p[: a.size]
                continue
            if l2[s] != 0:
                _add_scaled(g, l2[s], p)
            if shrink[s] != 0:
                _multiply(p, 1 - shrink[s])
            _apply(rule, constants, p, g, slot0[start:stop], slot1[start:stop])
            _follow(a, p, follow)


@elementwise
def measure_segments(
    directed: bool,
    normed: bool,
    constants: Constants,
    segments: Array,
    scale: float,
    decay: Array,
    rows: Array,
    own: Array,
    params: Array,
    slot0: Array,
    slot1: Array,
    sums: Array,
    scratch: Array,
) -> None:
    """Write each segment's gradient, or Adam's direction where ``directed``, to ``own``; sum its squares.

    Args:
        sums: Shape (k, 2), float64: set to the sums of squares of params (only where ``normed``) and of what
            is written to ``own``.
        decay: Shape (k,), float64: this times params is added to a direction.

    The rest as in ``update_segments``; ``own`` may be one of the rows.
    """
    for s in range(segments.shape[0]):
        sums[s, 0] = sums[s, 1] = 0
        for start in range(segments[s, 0], segments[s, 1], BLOCK):
            stop = min(start + BLOCK, segments[s, 1])
            p, g = params[start:stop], scratch[: stop - start]
            _sum_rows(rows, start, stop, scale, g)
            if segments[s, 2] == 1:
                if directed:
                    _adam_direction(p, g, slot0[start:stop], slot1[start:stop], constants, decay[s])
                if normed:
                    sums[s, 0] += _sum_squares(p)
                sums[s, 1] += _sum_squares(g)
            own[start:stop] = g


@elementwise
def _sum_rows(rows: Array, start: int, stop: int, scale: float, out: Array) -> None:
    """out = scale * (rows[0] + rows[1] + ...)[start:stop], added in that order."""
    n = rows.shape[0]
    factor = out.dtype.type(scale)
    if n == 1:
        _scale(rows[0, start:stop], factor, out)
        return
    one = out.dtype.type(1)
    _add(rows[0, start:stop], rows[1, start:stop], factor if n == 2 else one, out)
    for r in range(2, n):
        _add(out, rows[r, start:stop], factor if r == n - 1 else one, out)


@elementwise
def _scale(a: Array, factor: float, out: Array) -> None:
    for i in range(out.size):
        out[i] = factor * a[i]


@elementwise
def _add(a: Array, b: Array, factor: float, out: Array) -> None:
    for i in range(out.size):
        out[i] = factor * (a[i] + b[i])


@elementwise
def _add_scaled(y: Array, factor: float, x: Array) -> None:
    c = y.dtype.type(factor)
    for i in range(y.size):
        y[i] += c * x[i]


@elementwise
def _multiply(y: Array, factor: float) -> None:
    c = y.dtype.type(factor)
    for i in range(y.size):
        y[i] *= c


@elementwise
def _follow(average: Array, p: Array, part: float) -> None:
    c = p.dtype.type(part)
    for i in range(average.size):
        average[i] += c * (p[i] - average[i])


@kernel
def _sum_squares(x: Array) -> float:
    total = 0.0
    for i in range(x.size):
        value = float(x[i])
        total += value * value
    return total


@elementwise
def _apply(rule: int, constants: Constants, p: Array, g: Array, slot0: Array, slot1: Array) -> None:
    if rule == SGD:
        _add_scaled(p, -constants[0], g)
    elif rule == MOMENTUM:
        _momentum(p, g, slot0, constants)
    elif rule == NESTEROV:
        _nesterov(p, g, slot0, constants)
    elif rule == ADAM:
        _adam(p, g, slot0, slot1, constants)
    elif rule == ADAGRAD:
        _adagrad(p, g, slot0, constants)
    elif rule == RMSPROP:
        _rmsprop(p, g, slot0, constants)


@elementwise
def _momentum(p: Array, g: Array, velocity: Array, constants: Constants) -> None:
    lr, momentum = p.dtype.type(constants[0]), p.dtype.type(constants[1])
    for i in range(p.size):
        velocity[i] = momentum * velocity[i] + g[i]
        p[i] -= lr * velocity[i]


@elementwise
def _nesterov(p: Array, g: Array, velocity: Array, constants: Constants) -> None:
    lr, momentum = p.dtype.type(constants[0]), p.dtype.type(constants[1])
    for i in range(p.size):
        velocity[i] = momentum * velocity[i] + g[i]
        p[i] -= lr * (g[i] + momentum * velocity[i])


@elementwise
def _adam(p: Array, g: Array, m: Array, v: Array, constants: Constants) -> None:
    lr, eps = p.dtype.type(constants[0]), p.dtype.type(constants[3])
    keep1, keep2 = p.dtype.type(constants[1]), p.dtype.type(constants[2])
    take1, take2 = p.dtype.type(1 - constants[1]), p.dtype.type(1 - constants[2])
    for i in range(p.size):
        m[i] = keep1 * m[i] + take1 * g[i]
        v[i] = keep2 * v[i] + take2 * (g[i] * g[i])
        p[i] -= lr * m[i] / (math.sqrt(v[i]) + eps)


@elementwise
def _adam_direction(p: Array, g: Array, m: Array, v: Array, constants: Constants, decay: float) -> None:
    """Replace the gradient by the direction that LAMB measures: Adam's, plus decay * params."""
    rate, eps = p.dtype.type(constants[0]), p.dtype.type(constants[3])
    keep1, keep2 = p.dtype.type(constants[1]), p.dtype.type(constants[2])
    take1, take2 = p.dtype.type(1 - constants[1]), p.dtype.type(1 - constants[2])
    shrink = p.dtype.type(decay)
    for i in range(p.size):
        m[i] = keep1 * m[i] + take1 * g[i]
        v[i] = keep2 * v[i] + take2 * (g[i] * g[i])
        g[i] = rate * m[i] / (math.sqrt(v[i]) + eps) + shrink * p[i]


@elementwise
def _adagrad(p: Array, g: Array, total: Array, constants: Constants) -> None:
    lr, eps = p.dtype.type(constants[0]), p.dtype.type(constants[1])
    for i in range(p.size):
        total[i] += g[i] * g[i]
        p[i] -= lr * g[i] / (math.sqrt(total[i]) + eps)


@elementwise
def _rmsprop(p: Array, g: Array, square: Array, constants: Constants) -> None:
    lr, eps = p.dtype.type(constants[0]), p.dtype.type(constants[2])
    keep, take = p.dtype.type(constants[1]), p.dtype.type(1 - constants[1])
    for i in range(p.size):
        square[i] = keep * square[i] + take * (g[i] * g[i])
        p[i] -= lr * g[i] / (math.sqrt(square[i]) + eps)
