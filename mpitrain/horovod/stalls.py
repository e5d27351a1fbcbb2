"""The times at which an operation that some ranks have not submitted is reported, and fails."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

_ANSWER_S = 2.0  # time for the other ranks to report what they have submitted


class Action(Enum):
    """The action for operations that have waited long."""

    NONE = 0
    ASK = 1  # query the operations that the other ranks have submitted
    REPORT = 2
    FAIL = 3


class StallCheck:
    """Decides on the action for operations that have waited long. Local.

    Args:
        stall_s: Seconds after which an operation is reported repeatedly; None for never.
        shutdown_s: Seconds after which it fails; None for never.
    """

    def __init__(self, stall_s: float | None, shutdown_s: float | None) -> None:
        self._stall_s, self._shutdown_s = stall_s, shutdown_s
        self._next, self._asked = 0.0, False

    def check(self, now: float, submitted: Sequence[float]) -> Action:
        """Return the action for pending operations that were submitted at these times."""
        age = now - min(submitted, default=now)
        if self._shutdown_s is not None and age > self._shutdown_s:
            return Action.FAIL
        if self._stall_s is None or age <= self._stall_s or now < self._next:
            return Action.NONE
        self._asked = not self._asked
        self._next = now + (_ANSWER_S if self._asked else self._stall_s)
        return Action.ASK if self._asked else Action.REPORT
