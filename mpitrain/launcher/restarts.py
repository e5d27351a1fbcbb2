"""Decide whether and when to restart the ranks after a failure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .outcome import Kind, Outcome

_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class Interruption:
    """An interruption of training by a failure.

    Attributes:
        time: When the first rank ended, in seconds since the epoch.
        step: The number of completed steps; None if training had not started.
        restarts: The number of restarts since then; all except the last one failed before training.
    """

    time: float
    step: int | None
    restarts: int = 1


class Restarts:
    """The restarts of a run after failures.

    Args:
        max_restarts: The maximum number of restarts.
        resumes_from_state: Whether the ranks of a restart continue from saved states; a program need not do so.
        time_limit_s: The time that the run may take, in seconds, or None.

    Attributes:
        count: The number of restarts.
        interruption: The interruption that the next attempt is to end; None if no failure precedes that attempt.
    """

    def __init__(self, max_restarts: int, resumes_from_state: bool, time_limit_s: float | None) -> None:
        self.max_restarts, self._resumes_from_state, self._time_limit_s = max_restarts, resumes_from_state, time_limit_s
        self.count = 0
        self.interruption: Interruption | None = None
        self._in_a_row = 0  # failures since training has last advanced
        self._last_failure: Outcome | None = None

    def reason_not_to_restart(self, failure: Outcome, ranks: int, elapsed_s: float) -> str:
        """Return why not to restart after a failure; empty if a restart may help.

        Args:
            ranks: The number of ranks.
            elapsed_s: The time since the run began, in seconds.
        """
        if self.count >= self.max_restarts:
            return f"--max-restarts {self.max_restarts} reached"
        why = ""
        if self._resumes_from_state or failure.kind is Kind.LAUNCH_FAILED:
            why = reason_to_give_up(failure, self._last_failure, ranks)
        if not why and self._time_limit_s is not None and elapsed_s + 1 > self._time_limit_s:
            why = f"--time-limit {self._time_limit_s:g} is used up"
        return why

    def add(self, failure: Outcome, ranks: int) -> float:
        """Count a restart after a failure; return the seconds to wait before it."""
        self.count += 1
        self._in_a_row = 1 if has_advanced(failure, self._last_failure, ranks) else self._in_a_row + 1
        self._last_failure = failure
        if self.interruption is not None and failure.step is None:
            self.interruption = replace(self.interruption, restarts=self.interruption.restarts + 1)
        else:
            self.interruption = Interruption(failure.ended_at, failure.step)
        return restart_delay_s(self._in_a_row)

    def forget_failures(self) -> None:
        """Continue as if there had been no failure, because the ranks were stopped on request."""
        self.interruption = self._last_failure = None


def restart_delay_s(restart: int) -> float:
    """Return the seconds to wait before the 1st, 2nd, ... restart since training has advanced: 0, 1, 2, 4, ..."""
    return 0.0 if restart == 1 else min(_LONGEST_PAUSE_S, 2.0 ** (restart - 2))


def has_advanced(now: Outcome, before: Outcome | None, ranks: int) -> bool:
    """Return whether training has advanced since the failure before this one; True at the first failure.

    As ranks may be at different steps, an advance counts only if it has more steps than there are ranks.
    """
    return before is None or (now.step is not None and (before.step is None or now.step > before.step + ranks))


def reason_to_give_up(now: Outcome, before: Outcome | None, ranks: int) -> str:
    """Return why another attempt would fail in the same way; empty if it might succeed.

    The two failed steps may differ by up to ``ranks``: in the asynchronous modes ranks are not at the same step.
    """
    if before is None or any(each.lost_hosts or each.is_external for each in (now, before)):
        return ""
    if now.step is None and before.step is None:
        return "the run failed twice before training started"
    if now.step is not None and before.step is not None and abs(now.step - before.step) <= ranks:
        return f"the run failed twice in step {now.step + 1:,}"
    return ""
