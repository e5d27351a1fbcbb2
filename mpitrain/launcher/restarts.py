"""Decide whether and when a restart can help."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .outcome import Outcome

_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class Interruption:
    """An interruption of training by a failure.

    Attributes:
        time: When the first rank ended, in seconds since the epoch.
        step: The number of completed steps; None if training had not started.
        restarts: The number of restarts since then, of which all but the last one failed before training.
    """

    time: float
    step: int | None
    restarts: int = 1


def interruption_after(failure: Outcome, before: Interruption | None) -> Interruption:
    """Return the interruption that the next restart is to end: that ``before`` if training has not continued since."""
    if before is not None and failure.step is None:
        return replace(before, restarts=before.restarts + 1)
    return Interruption(failure.ended_at, failure.step)


def restart_delay_s(restart: int) -> float:
    """Return the seconds to wait before the 1st, 2nd, ... restart since training has advanced: 0, 1, 2, 4, ..."""
    return 0.0 if restart == 1 else min(_LONGEST_PAUSE_S, 2.0 ** (restart - 2))


def has_advanced(now: Outcome, before: Outcome | None, ranks: int) -> bool:
    """Return whether training has advanced since the failure before this one; True at the first failure.

    As ranks may be at different steps, it counts only if it exceeds their number.
    """
    return before is None or (now.step is not None and (before.step is None or now.step > before.step + ranks))


def reason_to_give_up(now: Outcome, before: Outcome | None, ranks: int) -> str:
    """Return why another attempt would fail in the same way; empty if it might not.

    The two failed steps may differ by up to ``ranks``: in the asynchronous modes ranks are not at the same step.
    """
    if before is None or now.lost_hosts or before.lost_hosts or now.is_killed:
        return ""
    if now.step is None and before.step is None:
        return "it failed twice before training started"
    if now.step is not None and before.step is not None and abs(now.step - before.step) <= ranks:
        return f"it failed twice in step {now.step + 1:,}"
    return ""
