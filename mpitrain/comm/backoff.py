"""Waiting for another rank: spin, then yield the core, then sleep."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ..core import activity

_SPINS = 2000  # number of spins, about 20 us, before a waiting rank first yields its core
_YIELD_S = 300e-6  # time spent yielding before the rank sleeps
_FEW = 16
_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 500e-6
LONG = 2000  # number of short sleeps, about 0.2 s, before longer sleeps; these delay the end of a wait by at most 1 ms


class Backoff:
    """Waits for another process without taking CPU time from it during a long wait.

    Args:
        oversubscribed: Whether there are more ranks than cores, so that spinning could block the other rank.
        yield_s: Seconds spent yielding before the rank sleeps.

    Attributes:
        progress: Called repeatedly while waiting, so that MPI makes progress. Other ranks may depend on it: a Put to
            this rank completes only if this rank lets MPI progress.
    """

    def __init__(
        self, oversubscribed: bool, progress: Callable[[], object] | None = None, yield_s: float = _YIELD_S
    ) -> None:
        self.progress, self._yield_s = progress, yield_s
        self._spins = 1 if oversubscribed else _SPINS
        self._launcher = os.getppid()

    def until(
        self,
        reached: Callable[[int], bool],
        progress: Callable[[], object] | None = None,
        blocking_rank: Callable[[], int] | None = None,
    ) -> None:
        """Return when ``reached(n)``, which polls n times, returns True.

        ``progress`` overrides the attribute. ``blocking_rank`` returns the rank that this rank waits for, and is called
        only during a long wait. Exits the process if its launcher has been killed.
        """
        progress = progress or self.progress
        if reached(self._spins):
            return
        until = time.perf_counter() + self._yield_s
        while time.perf_counter() < until:
            if progress is not None:
                progress()
            os.sched_yield()
            if reached(_FEW):
                return
        slept = 0
        while not reached(_FEW):
            if progress is not None:
                progress()
            self.pause(slept)
            slept += 1
            if slept % LONG == 0 and blocking_rank is not None:
                activity.wait_for(blocking_rank())
        activity.wait_for(None)

    def pause(self, slept: int) -> None:
        """Sleep briefly, longer after many sleeps. Exit if the launcher has been killed."""
        if os.getppid() != self._launcher:
            # Without the launcher nobody reports other failed ranks, so this rank cannot shut down in order.
            os._exit(1)
        time.sleep(_SLEEP_S if slept < LONG else _LONGEST_SLEEP_S)
