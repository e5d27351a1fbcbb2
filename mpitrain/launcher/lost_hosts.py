"""Detect lost hosts: on a power or network failure no connection closes, and the other ranks wait forever."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

STALL_S = 60.0  # without progress before hosts are checked, and between two checks
_LOST_AFTER = 2  # consecutive checks without an answer


class LostHostDetector:
    """Checks whether hosts answer, but only while no rank makes progress.

    Args:
        ask: Returns the hosts that do not answer, with the error of each; runs in a thread.
    """

    def __init__(self, ask: Callable[[], dict[str, str]], now: float) -> None:
        self._ask, self._thread = ask, ThreadPoolExecutor(1, "stall")
        self._steps: object = None
        self._since = now
        self._pending: Future[dict[str, str]] | None = None
        self._silent: dict[str, int] = {}

    def lost(self, steps: object, now: float) -> bool:
        """Return whether a host is lost.

        Args:
            steps: The progress of all ranks; compared with the previous value.
            now: Current time in seconds.
        """
        if steps != self._steps:
            self._steps, self._since, self._silent = steps, now, {}
        if self._pending is not None and self._pending.done():
            answers, self._pending = self._pending.result(), None
            self._silent = {host: self._silent.get(host, 0) + 1 for host in answers}
        elif self._pending is None and now - self._since >= STALL_S:
            self._since = now
            self._pending = self._thread.submit(self._ask)
        return any(times >= _LOST_AFTER for times in self._silent.values())

    def close(self) -> None:
        """Shut the thread down."""
        self._thread.shutdown(wait=False, cancel_futures=True)
