"""The step coordinator of ``async`` and ``ssp``, in which every gradient is one step."""

from __future__ import annotations

from ...comm.atomics import lock, release
from ...comm.shared_memory import SharedArrays
from ...core.kernels import kernel
from ...core.layout import Array
from .coordinator import (
    CLOCK,
    DONE,
    HEAD,
    LOCK,
    NEXT,
    PAUSE_STEP,
    READS,
    ROW,
    WAIT,
    Assignment,
    CoordinatorMemory,
    close_step,
    count_gradient,
    pause_or_end,
)

_NO_BOUND = 1 << 62  # a lead that no worker reaches


@kernel
def _next_item(words: Array, worker: int, workers: int, bound: int) -> tuple[int, int, int]:
    """Return the fields of an ``Assignment``."""
    lock(words, LOCK)
    step, lead = words[NEXT], 0
    item = pause_or_end(words, worker, step)
    if item == WAIT and step < words[PAUSE_STEP]:
        lead = words[HEAD + worker * ROW + CLOCK]
        slowest = lead
        for w in range(workers):
            slowest = min(slowest, words[HEAD + w * ROW + CLOCK])
        lead -= slowest
        if lead <= bound:
            item = step
            words[NEXT] += 1
    release(words, LOCK)
    return item, step, lead


@kernel
def _finish(words: Array, worker: int, loss: float, staleness: int, reads: int, skipped: bool) -> int:
    lock(words, LOCK)
    row = words[HEAD + worker * ROW : HEAD + (worker + 1) * ROW]
    row[READS] += reads
    if not skipped:
        count_gradient(row, staleness)
    row[CLOCK] += 1
    close_step(words, loss, skipped)
    done = words[DONE]
    release(words, LOCK)
    return done  # type: ignore[no-any-return]


class CountedSteps(CoordinatorMemory):
    """See ``CoordinatorMemory``.

    Args:
        max_lead: How many steps a worker may be ahead of the slowest worker; None for no bound.
    """

    def __init__(self, shared: SharedArrays, workers: int, max_lead: int | None = None) -> None:
        super().__init__(shared, workers)
        self._bound = _NO_BOUND if max_lead is None else max_lead

    def next(self, worker: int) -> Assignment:
        return Assignment(*_next_item(self._words, worker, self._workers, self._bound))

    def finish(self, worker: int, loss: float, staleness: int, reads: int, skipped: bool = False) -> int:
        """Count a gradient that was applied by all shards, or skipped; return the number of steps done."""
        return _finish(self._words, worker, loss, staleness, reads, skipped)

    def _next_step(self) -> int:
        return int(self._words[NEXT])

    def _earliest_end(self) -> int:
        return int(self._words[NEXT])
