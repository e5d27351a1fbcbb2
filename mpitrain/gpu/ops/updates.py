"""Compiled update rules, and decisions of a step on the device, so that the host need not wait."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.layout import Array
from ...optim.compiled import CONSTANTS, CompiledRule, Constants
from .grid import THREADS, WARP, begin, empty, flat, int32, int64, kernel, line, numeric_kind, or_null

_CHUNK = 2048  # as in optim.cu
_ZERO = np.float64(0)


def update_segments(
    rule: CompiledRule,
    constants: Constants,
    segments: Array,
    scales: Array,
    l2: Array,
    decay: Array,
    rate: float,
    rows: Array,
    order: Array,
    origin: int,
    params: Array,
    slot0: Array,
    slot1: Array,
    average: Array,
    ema_weight: float,
    *,
    go: Array | None = None,
    factor: Array | None = None,
) -> None:
    """Update params, slots and average on every segment in one pass; segments ascend and do not overlap.

    The arguments are the same as for ``CompiledRule.update_segments``.

    Args:
        go: Shape (1,), float64: 0 skips the update.
        factor: Shape (1,), float64: additional factor of parameter gradients.
    """
    arguments = (
        *_padded(constants),
        *(segments, int32(len(segments)), scales, l2, decay, np.float64(rate)),
        *(rows, int64(rows.shape[1]), order, int32(order.size), int64(origin), int64(params.size)),
        *(params, or_null(slot0), or_null(slot1), or_null(average), np.float64(ema_weight)),
        *(_given(go), _given(factor)),
    )
    if len(segments):
        line(kernel("optim", f"update_segments_{rule.name}", params), params.size, _CHUNK, arguments)


def measure_segments(
    rule: CompiledRule | None,
    constants: Constants,
    param_norms: bool,
    segments: Array,
    decay: Array,
    rows: Array,
    order: Array,
    out: Array,
    params: Array,
    slot0: Array,
    slot1: Array,
    sums: Array,
    *,
    go: Array | None = None,
    factor: Array | None = None,
) -> None:
    """Write each segment's gradient, or the direction of ``rule``, to ``out``; sum its squares.

    The arguments are the same as for ``CompiledRule.measure_segments`` and ``update_segments``.
    """
    if not len(segments):
        return
    parts = empty((-(-params.size // _CHUNK) + len(segments), 2), np.float64)
    arguments = (
        *_padded(constants),
        *(segments, int32(len(segments)), decay, rows, int64(rows.shape[1]), order, int32(order.size)),
        *(out, int64(params.size), params, or_null(slot0), or_null(slot1), parts, _given(go), _given(factor)),
    )
    measure = kernel("optim", f"measure_segments_{'gradient' if rule is None else rule.name}", params)
    line(measure, params.size, _CHUNK, arguments)  # parts belong to chunks, so their sum does not depend on the grid
    arguments = (segments, int32(param_norms), parts, sums)
    begin(kernel("optim", "sum_segments", params), (len(segments), 1), (THREADS, 1), arguments)


def _padded(constants: Constants) -> tuple[np.float64, ...]:
    return (*map(np.float64, constants), *[_ZERO] * (CONSTANTS - len(constants)))


# Decisions; see step.cu.

GO, FACTOR, SCALE, GOOD, STOPPED, OVERFLOW, OWN, TOTAL, UPDATED = range(9)  # indices in the state, shape (9,), float64
POLICIES = ("stop", "skip", "ignore")


def decide_update(own: Array, total: Array, policy: str, scaled: bool, state: Array) -> None:
    """Decide whether to apply a step's update, and the factor of its gradient.

    Args:
        own: Shape (1,), float64: this worker's share of the loss.
        total: Shape (1,): the loss over all workers.
        policy: Action on a non-finite loss.
        scaled: Whether the loss's gradient was multiplied by ``state[SCALE]``, which is then adjusted.
        state: Shape (9,), float64.
    """
    policy_number = np.int32(POLICIES.index(policy))
    _single("decide_update", state, (own, total, numeric_kind(total), policy_number, np.int32(scaled), state))


def find_overflow(values: Array, flag: Array) -> None:
    """Set ``flag``, shape (1,), float64, to 1 if any of ``values`` is not finite; else leave it unchanged."""
    flat("step", "find_overflow", values, values.size, (int64(values.size), values, flag))


def copy_loss(loss: Array, place: Array) -> None:
    """Copy a loss, shape (1,), float64, to an array of another type."""
    _single("copy_loss", place, (loss, place))


def _single(name: str, typed: Array, arguments: tuple[Any, ...]) -> None:
    """Launch a kernel that uses one thread of one warp."""
    begin(kernel("step", name, typed), (1, 1), (WARP, 1), arguments)


def _given(number: Array | None) -> Array | np.uint64:
    return np.uint64(0) if number is None else number
