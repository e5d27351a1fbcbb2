"""How a rank waits for another: it spins, then lets others run, then sleeps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_SPINS = 2000  # some 20 us before a waiting rank lets others run, where every rank has a core
_YIELD_S = 300e-6  # then so long it gives up the core again and again before it sleeps
_FEW = 16
_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 500e-6
LONG = 2000  # short sleeps, some 0.2 s, before they grow: who waits longer wakes within a millisecond


class Backoff:
    """Waits for something that another process does, so that a long wait takes nothing from those that are waited for.

    Args:
        crowded: There are more ranks than cores: a spinning rank keeps the one that it waits for from running.
        yield_s: Seconds before it sleeps.

    Attributes:
        progress: Called now and then while waiting, for MPI to move what is under way between nodes. Others may wait
            for that: a Put to this rank ends only when this rank lets MPI progress.
    """

    def __init__(
        self, oversubscribed: bool, progress: Callable[[], object] | None = None, yield_s: float = _YIELD_S
    ) -> None:
        self.progress, self._yield_s = progress, yield_s
        self._spins = 1 if oversubscribed else _SPINS
        self._launcher = os.getppid()

    def until(self, reached: Callable[[int], bool], progress: Callable[[], object] | None = None) -> None:
        """Return when ``reached`` says so, which is given how many times to look.

        ``progress`` takes the place of the attribute. Ends the process where its launcher has been killed.
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

    def pause(self, slept: int) -> None:
        """Sleep a little, longer after many times; end with the launcher."""
        if os.getppid() != self._launcher:
            # The launcher is gone, and with it whoever would tell that the others are. An orderly end needs both.
            os._exit(1)
        time.sleep(_SLEEP_S if slept < LONG else _LONGEST_SLEEP_S)
