"""Kernels of ``optim.rules``, and the decisions of a step on the device, so that the host need not wait."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.layout import Array
from .grid import KINDS, THREADS, WARP, begin, empty, flat, int32, int64, kernel, line, or_null

_CHUNK = 2048  # as in optim.cu
RULES = ("sgd", "momentum", "nesterov", "adam", "adagrad", "rmsprop")  # in the order of optim/rules.py


def update_segments(
    rule: int,
    constants: tuple[float, float, float, float],
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
    scratch: Array | None = None,
    *,
    rate: float = 1.0,
    go: Array | None = None,
    factor: Array | None = None,
) -> None:
    """Update params, slots and average on every segment in one pass; segments ascend and do not overlap.

    The arguments are those of ``rules.update_segments``; ``scratch`` is not used.

    Args:
        rate: Factor of ``shrink``.
        go: Shape (1,), float64: 0 skips the update.
        factor: Shape (1,), float64: additional factor of parameter gradients.
    """
    arguments = (
        *(np.float64(value) for value in constants),
        *(segments, int32(len(segments)), scales, l2, shrink, np.float64(rate)),
        *(rows, int64(rows.shape[1]), order, int32(order.size), int64(origin), int64(params.size)),
        *(params, or_null(slot0), or_null(slot1), or_null(average), np.float64(follow)),
        *(_given(go), _given(factor)),
    )
    if len(segments):
        line(kernel("optim", f"update_segments_{RULES[rule]}", params), params.size, _CHUNK, arguments)


def measure_segments(
    directed: bool,
    normed: bool,
    constants: tuple[float, float, float, float],
    segments: Array,
    decay: Array,
    rows: Array,
    order: Array,
    own: Array,
    params: Array,
    slot0: Array,
    slot1: Array,
    sums: Array,
    scratch: Array | None = None,
    *,
    go: Array | None = None,
    factor: Array | None = None,
) -> None:
    """Write each segment's gradient, or Adam's direction if ``directed``, to ``own``; sum its squares.

    The arguments are those of ``rules.measure_segments``, and of ``update_segments``; ``scratch`` is not used.
    """
    if not len(segments):
        return
    parts = empty((-(-params.size // _CHUNK) + len(segments), 2), np.float64)
    arguments = (
        *(np.float64(value) for value in constants),
        *(segments, int32(len(segments)), decay, rows, int64(rows.shape[1]), order, int32(order.size)),
        *(own, int64(params.size), params, or_null(slot0), or_null(slot1), parts, _given(go), _given(factor)),
    )
    measure = kernel("optim", "measure_directions" if directed else "measure_gradients", params)
    line(measure, params.size, _CHUNK, arguments)  # parts belong to chunks, so their sum does not depend on the grid
    arguments = (segments, int32(normed), parts, sums)
    begin(kernel("optim", "sum_segments", params), (len(segments), 1), (THREADS, 1), arguments)


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
    kind, policy_number = int32(KINDS.index(total.dtype.name)), int32(POLICIES.index(policy))
    _single("decide_update", state, (own, total, kind, policy_number, int32(scaled), state))


def find_overflow(values: Array, flag: Array) -> None:
    """Set ``flag``, shape (1,), float64, to 1 if any of ``values`` is not finite; else leave it unchanged."""
    flat("step", "find_overflow", values, values.size, (int64(values.size), values, flag))


def note_loss(loss: Array, place: Array) -> None:
    """Copy a loss, shape (1,), float64, to an array of another type."""
    _single("note_loss", place, (loss, place))


def clip_scales(segments: Array, sums: Array, largest: float, scales: Array) -> None:
    """Set ``scales``, shape (k,), to the factor that clips the whole gradient's norm to ``largest``.

    Args:
        sums: Shape (k, 2), from ``measure_segments``.
    """
    _single("clip_scales", sums, (segments, int32(len(segments)), sums, np.float64(largest), scales))


def layer_scales(
    segments: Array,
    sums: Array,
    decayed: Array,
    rate: float,
    ratio: tuple[float, float, bool],
    largest: float,
    decay: float,
    scales: Array,
    l2: Array,
) -> None:
    """Set the factors of a layerwise optimizer's segments, one per parameter, from their norms.

    Args:
        sums: Shape (k, 2): squared norms of the parameters and of their gradients or directions.
        ratio: (above, below, clipped): the trust ratio is above * |params| / (|gradient| + below * |params|), with the
            clipped gradient or the original one.
        largest: Maximum norm of the whole gradient; infinite for no clipping.
        decay: Value of ``l2`` where ``decayed`` is 1, times the segment's scale.
        scales, l2: Shape (k,): outputs.
    """
    above, below, clipped = ratio
    scalars = np.float64(rate), np.float64(above), np.float64(below), int32(clipped), np.float64(largest)
    arguments = (segments, int32(len(segments)), sums, decayed, *scalars, np.float64(decay), scales, l2)
    _single("layer_scales", sums, arguments)


def _single(name: str, typed: Array, arguments: tuple[Any, ...]) -> None:
    """Launch a kernel that uses one thread of one warp."""
    begin(kernel("step", name, typed), (1, 1), (WARP, 1), arguments)


def _given(number: Array | None) -> Array | np.uint64:
    return np.uint64(0) if number is None else number
