"""Those of optim/rules.py."""

from __future__ import annotations

import numpy as np

from ...params import Array
from .grid import THREADS, begin, blocks, empty, int32, int64, named, or_null

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
) -> None:
    """Update params, slots and average on every segment, all in one pass; segments ascend and do not overlap.

    The arguments are those of ``rules.update_segments``; ``scratch`` is not used.
    """
    arguments = (
        *(np.float64(value) for value in constants),
        *(segments, int32(len(segments)), scales, l2, shrink),
        *(rows, int64(rows.shape[1]), order, int32(order.size), int64(origin), int64(params.size)),
        *(params, or_null(slot0), or_null(slot1), or_null(average), np.float64(follow)),
    )
    if len(segments):
        begin("optim", named(f"update_segments_{RULES[rule]}", params), (_chunks(params), 1), (THREADS, 1), arguments)


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
) -> None:
    """Write each segment's gradient, or Adam's direction where ``directed``, to ``own``; sum its squares.

    The arguments are those of ``rules.measure_segments``; ``scratch`` is not used.
    """
    if not len(segments):
        return
    parts = empty((-(-params.size // _CHUNK) + len(segments), 2), np.float64)
    arguments = (
        *(np.float64(value) for value in constants),
        *(segments, int32(len(segments)), decay, rows, int64(rows.shape[1]), order, int32(order.size)),
        *(own, int64(params.size), params, or_null(slot0), or_null(slot1), parts),
    )
    name = named("measure_directions" if directed else "measure_gradients", params)
    begin("optim", name, (_chunks(params), 1), (THREADS, 1), arguments)
    begin("optim", "sum_segments", (len(segments), 1), (THREADS, 1), (segments, int32(normed), parts, sums))


def _chunks(params: Array) -> int:
    return blocks(params.size, _CHUNK)
