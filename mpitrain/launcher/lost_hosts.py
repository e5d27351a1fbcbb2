"""Notices a host that is gone without a word: no connection is closed when power or a network fails, and ranks wait."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

STALL_S = 60.0  # without a step before hosts are asked, and between two questions
_LOST_AFTER = 2  # questions in a row without an answer


class LostHostDetector:
    """Asks hosts whether they are there, but only while no rank comes forward.

    Args:
        ask: Returns the hosts that do not answer, and what was said instead; called in a thread.
    """

    def __init__(self, ask: Callable[[], dict[str, str]], now: float) -> None:
        self._ask, self._thread = ask, ThreadPoolExecutor(1, "stall")
        self._steps: object = None
        self._since = now
        self._asking: Future[dict[str, str]] | None = None
        self._silent: dict[str, int] = {}

    def lost(self, steps: object, now: float) -> bool:
        """Whether a host is gone.

        Args:
            steps: Where the ranks are: compared with where they were.
            now: In seconds.
        """
        if steps != self._steps:
            self._steps, self._since, self._silent = steps, now, {}
        if self._asking is not None and self._asking.done():
            answers, self._asking = self._asking.result(), None
            self._silent = {host: self._silent.get(host, 0) + 1 for host in answers}
        elif self._asking is None and now - self._since >= STALL_S:
            self._since = now
            self._asking = self._thread.submit(self._ask)
        return any(times >= _LOST_AFTER for times in self._silent.values())

    def close(self) -> None:
        """Give the thread back."""
        self._thread.shutdown(wait=False, cancel_futures=True)
