"""How an attempt ended, and whether another one is worth it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..process.rank_status import RankStatus
from .exit_report import (
    describe_error,
    describe_exit,
    find_status,
    first_error,
    is_secondary,
    is_secondary_error,
    parse_exits,
    parse_lost_hosts,
    recorded_exits,
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
    reason: str = ""
    step: int | None = None
    gone: list[str] = field(default_factory=list)


def classify_exit(status: int, output: str, statuses: Sequence[RankStatus], ranks: int, launcher: str) -> Outcome:
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
    if statuses and all(rank_status.done for rank_status in statuses) and (ended_well or len(statuses) >= ranks):
        # A launcher ends the other ranks as soon as one has ended with a status, and does not give them long.
        exits = [
            rank_exit
            for rank_exit in recorded_exits(statuses)
            if rank_exit.signal not in (0, signal.SIGTERM, signal.SIGKILL)
        ]
        reason = f"{describe_exit(exits[0], statuses, ranks)}; everything is saved" if exits else ""
        return Outcome("stopped" if any(rank_status.stopped for rank_status in statuses) else "finished", reason)
    if not statuses and ended_well and not parse_lost_hosts(output):
        return Outcome("stopped" if status else "finished")
    if any(rank_status.mistake for rank_status in statuses):
        return Outcome("mistake")
    step = (
        max((rank_status.step for rank_status in statuses), default=0)
        if any(rank_status.ready for rank_status in statuses)
        else None
    )
    failed, exits, lost = first_error(statuses), recorded_exits(statuses), parse_lost_hosts(output)
    caused = lost or (exits and not is_secondary(exits[0]))
    if failed is not None and not (caused and is_secondary_error(failed)):
        return Outcome("failed", describe_error(failed, statuses, ranks), failed.step if failed.ready else None)
    exits = exits or parse_exits(output)
    if statuses and lost and (not exits or is_secondary(exits[0])):
        return Outcome("failed", f"{launcher}, has lost {lost}{_at(step)}", step)
    if exits:
        rank_status = find_status(exits[0], statuses)
        if rank_status is not None and rank_status.ready and rank_status.role != "ps":
            step = rank_status.step
        return Outcome("failed", describe_exit(exits[0], statuses, ranks), step)
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    if not statuses:
        return Outcome("not begun", f"{launcher}, {how} before any rank had begun")
    return Outcome("failed", f"{launcher}, {how}{_at(step)}", step)


def _at(step: int | None) -> str:
    return " before training had begun" if step is None else f", in step {step + 1:,}"


def restart_delay_s(restart: int) -> float:
    """Seconds to wait before the 1st, 2nd, ... restart."""
    return min(_LONGEST_PAUSE_S, 2.0 ** (restart - 1))


def reason_to_give_up(now: Outcome, before: Outcome | None, ranks: int) -> str:
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
