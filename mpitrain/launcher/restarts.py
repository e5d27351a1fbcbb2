"""How an attempt ended, and whether another one is worth it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..process.rank_status import Entry
from .exit_report import (
    error_may_follow,
    find,
    first_error,
    may_follow,
    noted_deaths,
    read_deaths,
    read_lost,
    tell,
    tell_error,
)

Kind = Literal["finished", "stopped", "mistake", "failed", "not begun"]
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        what: A line about who died and how; empty where nobody did.
        step: The steps that were done when it failed; None where training had not begun.
        gone: Hosts that do not answer since.
    """

    kind: Kind
    what: str = ""
    step: int | None = None
    gone: list[str] = field(default_factory=list)


def judge(status: int, said: str, entries: Sequence[Entry], ranks: int, launcher: str) -> Outcome:
    """How an attempt ended.

    Args:
        status: The launcher's, negative where a signal killed it.
        said: By the launcher.
        entries: The ranks that had signed in.
        launcher: Its name and process, for the user.
    """
    # Ranks know best: Open MPI's launcher ends with 0 when it has lost a host, and with a status where a library
    # crashes when all is done.
    ended_well = status in (0, os.EX_TEMPFAIL)
    if entries and all(entry.done for entry in entries) and (ended_well or len(entries) >= ranks):
        # A launcher ends the other ranks as soon as one has ended with a status, and does not give them long.
        deaths = [death for death in noted_deaths(entries) if death.signal not in (0, signal.SIGTERM, signal.SIGKILL)]
        what = f"{tell(deaths[0], entries, ranks)}; everything is saved" if deaths else ""
        return Outcome("stopped" if any(entry.stopped for entry in entries) else "finished", what)
    if not entries and ended_well and not read_lost(said):
        return Outcome("stopped" if status else "finished")
    if any(entry.mistake for entry in entries):
        return Outcome("mistake")
    step = max((entry.step for entry in entries), default=0) if any(entry.ready for entry in entries) else None
    failed, deaths, lost = first_error(entries), noted_deaths(entries), read_lost(said)
    caused = lost or (deaths and not may_follow(deaths[0]))
    if failed is not None and not (caused and error_may_follow(failed)):
        return Outcome("failed", tell_error(failed, entries, ranks), failed.step if failed.ready else None)
    deaths = deaths or read_deaths(said)
    if entries and lost and (not deaths or may_follow(deaths[0])):
        return Outcome("failed", f"{launcher}, has lost {lost}{_at(step)}", step)
    if deaths:
        entry = find(deaths[0], entries)
        if entry is not None and entry.ready and entry.role != "ps":
            step = entry.step
        return Outcome("failed", tell(deaths[0], entries, ranks), step)
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    if not entries:
        return Outcome("not begun", f"{launcher}, {how} before any rank had begun")
    return Outcome("failed", f"{launcher}, {how}{_at(step)}", step)


def _at(step: int | None) -> str:
    return " before training had begun" if step is None else f", in step {step + 1:,}"


def pause_s(restart: int) -> float:
    """Seconds to wait before the 1st, 2nd, ... restart."""
    return min(_LONGEST_PAUSE_S, 2.0 ** (restart - 1))


def why_not_again(now: Outcome, before: Outcome | None, ranks: int) -> str:
    """Why another attempt would fail as this one did; empty where it might not.

    Ranks need not die in just the same step for that: where they keep no common pace, each may be one further.
    """
    if before is None or now.gone or before.gone:
        return ""
    if now.step is None and before.step is None:
        return "it has failed twice before training had begun"
    if now.step is not None and before.step is not None and abs(now.step - before.step) <= ranks:
        return f"it has failed twice in step {now.step + 1:,}"
    return ""
