"""Optimizer arithmetic: one pass over memory, block by block.

A block is so small that its gradient, parameters and slots stay in the L1 cache. The loops over a block are separate
and short, because only such loops vectorize.
"""

from __future__ import annotations

import math

from ..core.kernels import kernel, reduction, sum_rows
from ..core.layout import Array

BLOCK = 2048  # elements: parameters, gradient and two slots of float32 fill an L1 cache of 32 KiB

# Rules are numbers because Numba cannot cache kernels that take functions as arguments.
SGD, MOMENTUM, NESTEROV, ADAM, ADAGRAD, RMSPROP = range(6)

Constants = tuple[float, float, float, float]


@kernel
def update_segments(
    rule: int,
    constants: Constants,
    segments: Array,
    scales: Array,
    l2: Array,
    shrink: Array,
    rows: Array,
    order: Array,
    origin: int,
    params: Array,
    slot0: Array,
    slot1: Array,
    average: Array,
    follow: float,
    scratch: Array,
) -> None:
    """Update params, slots and average on every segment.

    Args:
        rule: Number of the update rule, which takes ``constants``.
        segments: Shape (k, 3), int64: start, stop, and 1 for parameters or 0 for state.
        scales: Shape (k,), float64: factor of the sum of rows, which gives the gradient.
        l2: Shape (k,), float64: this times params is added to the gradient.
        shrink: Shape (k,), float64: this times params is subtracted from params before the update.
        rows: Shape (n, >= size), C-contiguous: gradients.
        order: Shape (k,), int64: indices of the rows to add, in this order.
        origin: Element of params that corresponds to the rows' first element.
        params, slot0, slot1, average: Shape (size,), of one dtype; empty if unused.
        follow: Fraction by which ``average`` moves towards params.
        scratch: Shape (BLOCK,).
    """
    for s in range(segments.shape[0]):
        for start in range(segments[s, 0], segments[s, 1], BLOCK):
            stop = min(start + BLOCK, segments[s, 1])
            # Slices, so that the inner loops start at zero: only those vectorize.
            p, a, g = params[start:stop], average[start:stop], scratch[: stop - start]
            sum_rows(rows, order, start - origin, stop - origin, scales[s], g)
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


@kernel
def measure_segments(
    directed: bool,
    normed: bool,
    constants: Constants,
    segments: Array,
    decay: Array,
    rows: Array,
    order: Array,
    own: Array,
    params: Array,
    slot0: Array,
    slot1: Array,
    sums: Array,
    scratch: Array,
) -> None:
    """Write each segment's gradient, or Adam's direction if ``directed``, to ``own``; sum its squares.

    Args:
        sums: Shape (k, 2), float64: output, the sums of squares of params (if ``normed``) and of the values written to
            ``own``.
        decay: Shape (k,), float64: this times params is added to a direction.

    The other arguments are as in ``update_segments``; ``own`` may be one of the rows.
    """
    for s in range(segments.shape[0]):
        sums[s, 0] = sums[s, 1] = 0
        for start in range(segments[s, 0], segments[s, 1], BLOCK):
            stop = min(start + BLOCK, segments[s, 1])
            p, g = params[start:stop], scratch[: stop - start]
            sum_rows(rows, order, start, stop, 1.0, g)
            if segments[s, 2] == 1:
                if directed:
                    _adam_direction(p, g, slot0[start:stop], slot1[start:stop], constants, decay[s])
                if normed:
                    sums[s, 0] += _sum_squares(p)
                sums[s, 1] += _sum_squares(g)
            own[start:stop] = g


@kernel
def _add_scaled(y: Array, factor: float, x: Array) -> None:
    c = y.dtype.type(factor)
    for i in range(y.size):
        y[i] += c * x[i]


@kernel
def _multiply(y: Array, factor: float) -> None:
    c = y.dtype.type(factor)
    for i in range(y.size):
        y[i] *= c


@kernel
def _follow(average: Array, p: Array, part: float) -> None:
    c = p.dtype.type(part)
    for i in range(average.size):
        average[i] += c * (p[i] - average[i])


@reduction
def _sum_squares(x: Array) -> float:
    total = 0.0
    for i in range(x.size):
        value = float(x[i])
        total += value * value
    return total


@kernel
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


@kernel
def _momentum(p: Array, g: Array, velocity: Array, constants: Constants) -> None:
    lr, momentum = p.dtype.type(constants[0]), p.dtype.type(constants[1])
    for i in range(p.size):
        velocity[i] = momentum * velocity[i] + g[i]
        p[i] -= lr * velocity[i]


@kernel
def _nesterov(p: Array, g: Array, velocity: Array, constants: Constants) -> None:
    lr, momentum = p.dtype.type(constants[0]), p.dtype.type(constants[1])
    for i in range(p.size):
        velocity[i] = momentum * velocity[i] + g[i]
        p[i] -= lr * (g[i] + momentum * velocity[i])


@kernel
def _adam(p: Array, g: Array, m: Array, v: Array, constants: Constants) -> None:
    lr, eps = p.dtype.type(constants[0]), p.dtype.type(constants[3])
    keep1, keep2 = p.dtype.type(constants[1]), p.dtype.type(constants[2])
    take1, take2 = p.dtype.type(1 - constants[1]), p.dtype.type(1 - constants[2])
    for i in range(p.size):
        m[i] = keep1 * m[i] + take1 * g[i]
        v[i] = keep2 * v[i] + take2 * (g[i] * g[i])
        p[i] -= lr * m[i] / (math.sqrt(v[i]) + eps)


@kernel
def _adam_direction(p: Array, g: Array, m: Array, v: Array, constants: Constants, decay: float) -> None:
    """Replace the gradient with the direction that LAMB measures: Adam's, plus decay * params."""
    rate, eps = p.dtype.type(constants[0]), p.dtype.type(constants[3])
    keep1, keep2 = p.dtype.type(constants[1]), p.dtype.type(constants[2])
    take1, take2 = p.dtype.type(1 - constants[1]), p.dtype.type(1 - constants[2])
    shrink = p.dtype.type(decay)
    for i in range(p.size):
        m[i] = keep1 * m[i] + take1 * g[i]
        v[i] = keep2 * v[i] + take2 * (g[i] * g[i])
        g[i] = rate * m[i] / (math.sqrt(v[i]) + eps) + shrink * p[i]


@kernel
def _adagrad(p: Array, g: Array, total: Array, constants: Constants) -> None:
    lr, eps = p.dtype.type(constants[0]), p.dtype.type(constants[1])
    for i in range(p.size):
        total[i] += g[i] * g[i]
        p[i] -= lr * g[i] / (math.sqrt(total[i]) + eps)


@kernel
def _rmsprop(p: Array, g: Array, square: Array, constants: Constants) -> None:
    lr, eps = p.dtype.type(constants[0]), p.dtype.type(constants[2])
    keep, take = p.dtype.type(constants[1]), p.dtype.type(1 - constants[1])
    for i in range(p.size):
        square[i] = keep * square[i] + take * (g[i] * g[i])
        p[i] -= lr * g[i] / (math.sqrt(square[i]) + eps)
