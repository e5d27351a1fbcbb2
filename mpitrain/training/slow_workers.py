"""Find a worker that slows down the other workers, and measure how long they wait, if all take the same steps."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence

from ..monitor.trace import span
from ..plan.hook import Hook, TrainingLoop
from ..plan.progress import ConsistentPoint
from ..strategy.base import Strategy

PERIOD_S = 10.0  # period over which workers are compared
# Number of steps at the beginning. They are not compared, because kernels are compiled in them. Their speed determines
# the number of steps of the first period.
_FIRST_STEPS = 10
_TIMES_TYPICAL, _SHARE = 2.0, 0.2  # slow: more than twice the others' median, and by more than a fifth of the period
_WAIT = span("wait")

_log = logging.getLogger(__name__)


class ReportSlowWorker(Hook):
    """Warns once about a worker that needs much more time for a batch and its loss than the others.

    Every ``PERIOD_S`` seconds or so, the workers exchange how long they have computed. Time in the backward pass and
    in hooks does not count, because it may contain waiting for other workers. They also exchange how long they have
    waited in steps or paused. The mean minus the chief's pauses is added to ``loop.waiting_s``: the others wait while
    the chief saves, which counts as saving.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def begin(self, loop: TrainingLoop) -> None:
        self._first, self._reported = True, False
        self._start_period(loop, loop.step, _FIRST_STEPS)

    def at_consistent_point(self, loop: TrainingLoop, point: ConsistentPoint) -> None:
        if point.step < self._compare_at and not point.last:
            return
        paused_s = sum(loop.paused_s.values()) - self._paused_s
        not_working_s = self._strategy.waited_s - self._waited_s + paused_s
        own = loop.compute_s - self._computed_s, time.perf_counter() - self._began, not_working_s
        with _WAIT:
            seconds, elapsed, others_s = zip(*loop.cluster.workers.allgather(own), strict=True)  # the same on all
        period_s = max(elapsed)
        if not self._first:  # kernels are compiled
            loop.waiting_s += max(0.0, statistics.fmean(others_s) - paused_s)
        is_short = self._first or period_s < PERIOD_S / 2
        worker = None if is_short or self._reported else slow_worker(seconds, period_s)
        self._first = False
        if worker is not None:
            self._reported = True
            _log.warning("%s", _describe(worker, seconds, loop.cluster.host_of[loop.cluster.worker_ranks[worker]]))
        self._start_period(loop, point.step, math.ceil((point.step - self._start) / period_s * PERIOD_S))

    def _start_period(self, loop: TrainingLoop, step: int, steps: int) -> None:
        self._start, self._compare_at = step, step + max(steps, 1)
        self._began, self._computed_s = time.perf_counter(), loop.compute_s
        self._waited_s, self._paused_s = self._strategy.waited_s, sum(loop.paused_s.values())


def slow_worker(seconds: Sequence[float], period_s: float) -> int | None:
    """Return the worker that slows down the others, or None.

    Args:
        seconds: Each worker's time for loading and computing within the period; two workers or more.
    """
    slowest = max(seconds)
    typical = _typical(seconds)
    if slowest > _TIMES_TYPICAL * typical and slowest - typical > _SHARE * period_s:
        return seconds.index(slowest)
    return None


def _typical(seconds: Sequence[float]) -> float:
    """Return the median of all values except the largest."""
    return statistics.median(sorted(seconds)[:-1])


def _describe(worker: int, seconds: Sequence[float], host: str) -> str:
    times = seconds[worker] / max(_typical(seconds), 1e-9)
    return (
        f"worker {worker} on {host} needs {times:.1f} times as long as the others to load a batch and compute its "
        "loss, and the other workers wait for it; check what slows it down"
    )
