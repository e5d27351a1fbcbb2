"""Requests to stop a run before its last step: signals and time limits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from .rank_status import RUN_DIR_VARIABLE

STOPPED_EARLY = os.EX_TEMPFAIL  # exit status 75: there is a checkpoint to resume from
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_ONCE_S = 0.5  # a launcher may forward a signal that the terminal has sent to all processes


class Signals:
    """Records signals that request a stop. The handler does nothing else, because it may run inside MPI.

    A second Ctrl-C ends the process immediately. Other signals may arrive twice, because schedulers signal both the
    processes of a job and its process group.

    Attributes:
        received: Name of the signal received, or None; ``requested`` if ``mpitrain run`` passed on a signal as SIGUSR1.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._received_at = 0.0

    def install(self) -> None:
        """Record signals from now on; call from the main thread."""
        for number in _SIGNALS:
            signal.signal(number, self._note)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record signals inside the block; enter from the main thread."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.install()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            passed_on = number == signal.SIGUSR1 and RUN_DIR_VARIABLE in os.environ
            self.received, self._received_at = "requested" if passed_on else signal.Signals(number).name, now
        elif number == signal.SIGINT and now - self._received_at > _ONCE_S:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)


class TimeLimit:
    """Decides when a run's remaining time is only enough to save.

    Args:
        end: When the time limit ends the run, in seconds since the epoch; None without a limit.
        began: When the run began, in seconds since the epoch.
    """

    def __init__(self, end: float | None, began: float) -> None:
        self._end = end
        # Reserve for the first save, whose duration is unknown, and for a file system that has become slower.
        self._spare_s = 0.0 if end is None else min(60.0, 0.05 * max(0.0, end - began))

    def reached(self, now: float, step_s: float, save_s: float) -> bool:
        """Return whether to stop now: after another step there might not be enough time to save.

        Args:
            now: Current time, in seconds since the epoch.
            step_s: Seconds per step.
            save_s: Seconds of the longest save so far.
        """
        return self._end is not None and now + 2 * step_s + 2 * save_s + self._spare_s >= self._end
