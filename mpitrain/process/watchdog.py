"""Decide whether a rank hangs: it makes no progress, and does not merely wait for another rank."""

from __future__ import annotations

import math

from ..core.activity import PATIENT_LIMIT_S, SHORTEST_LIMIT_S, TIMES_LONGEST, Activity

_USUAL_S, _TIMES_USUAL = 5.0, 3  # an activity is unusual if it exceeds both: seconds, multiples of the longest
_MEASURED_STEPS = 2  # steps after which the longest activity is known
_PATIENT = {"hooks", "load", "program"}
_LONG = {"start", "end", "done", "compile", "save", "validate"}
_WAITING = {"average", "push", "pull", "wait", "step"}
_DOING = {
    "start": "starting",
    "step": "agreeing with the other ranks on a step",
    "load": "loading data",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "update": "updating parameters",
    "average": "averaging with the other ranks",
    "push": "sending gradients",
    "pull": "receiving parameters",
    "wait": "waiting for the other ranks",
    "serve": "serving a request",
    "save": "saving a checkpoint",
    "validate": "validating",
    "hooks": "in a hook",
    "compile": "compiling kernels",
    "end": "ending",
    "done": "exiting",
    "program": "running the program",
}


class Watchdog:
    """Measures how long one process has made no progress.

    Any change of its activity is progress. A process that waits for others gets twice the limit of long operations,
    because another rank may validate and then save. A stopped process has the ordinary limit, whatever its last
    activity was.
    """

    def __init__(self) -> None:
        self._seen: Activity | None = None
        self._longest_s = 0.0  # duration of the longest activity that was neither waiting nor expected to be long
        self.idle_s = 0.0

    def hangs(self, seen: Activity, stopped: bool, elapsed_s: float) -> bool:
        """Return whether the process hangs.

        Args:
            seen: The present activity of the process.
            stopped: Whether the kernel has stopped the process.
            elapsed_s: Seconds since the last call, without the time in which the calling process was suspended.
        """
        before, self._seen = self._seen, seen
        if before is not None and seen.count == before.count:
            self.idle_s += elapsed_s
        else:
            if before is not None and not _is_long(before) and not is_waiting(before):
                self._longest_s = max(self._longest_s, self.idle_s)
            self.idle_s = 0.0
        return self.idle_s > self.limit_s(seen, stopped)

    def is_informed(self, seen: Activity) -> bool:
        """Return whether the activity can show a hang; the activity of a program can do so after its first report."""
        return seen.kinds[:1] != ("program",) or seen.count > 0

    def is_busy(self, seen: Activity, stopped: bool) -> bool:
        """Return whether the process may soon be done: it neither waits for others nor takes far longer than usual."""
        if stopped or is_waiting(seen):
            return False
        return (
            _is_long(seen)
            or seen.kinds[:1] == ("program",)
            or self.idle_s <= max(_USUAL_S, _TIMES_USUAL * self._longest_s)
        )

    def limit_s(self, seen: Activity, stopped: bool) -> float:
        """Return the seconds without progress after which the process hangs."""
        if seen.limit_s == 0 or not self.is_informed(seen):
            return math.inf
        limit_s = seen.limit_s
        if limit_s is None:
            shortest_s = SHORTEST_LIMIT_S if _PATIENT.isdisjoint(seen.kinds) else PATIENT_LIMIT_S
            limit_s = max(shortest_s, TIMES_LONGEST * self._longest_s)
        if stopped:
            return limit_s
        if is_waiting(seen):
            return max(limit_s, 2 * seen.long_limit_s)
        return max(limit_s, seen.long_limit_s) if _is_long(seen) else limit_s


def is_waiting(seen: Activity) -> bool:
    """Return whether a process waits for other ranks."""
    return seen.waits_for is not None or (bool(seen.kinds) and seen.kinds[-1] in _WAITING)


def _is_long(seen: Activity) -> bool:
    """Return whether the activity is expected to be long; by default, the first steps are expected to be long, too."""
    return not _LONG.isdisjoint(seen.kinds) or (seen.limit_s is None and seen.steps < _MEASURED_STEPS)


def describe(seen: Activity) -> str:
    """Return the activity of a process as text, such as ``in a hook``."""
    if seen.waits_for is not None:
        return f"waiting for rank {seen.waits_for}"
    doing = _DOING[seen.kinds[-1]]
    outer = next((kind for kind in seen.kinds[:-1] if kind in ("validate", "save", "hooks")), "")
    return f"{_DOING[outer]}, {doing}" if outer else doing
