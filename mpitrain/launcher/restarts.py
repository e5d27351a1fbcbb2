"""Classify how an attempt ended, and decide whether a restart can help."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..process.rank_status import RankStatus
from .exit_report import (
    RankExit,
    describe_early_exit,
    describe_error,
    describe_exit,
    find_status,
    first_error,
    first_to_finish,
    is_secondary,
    is_secondary_error,
    parse_exits,
    parse_lost_hosts,
    recorded_exits,
)

Kind = Literal["finished", "stopped", "user error", "failed", "not begun"]
_LONGEST_PAUSE_S = 60.0
_CLEANUP_S = 10.0  # within which a launcher ends the other ranks


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    reason: A line about which rank died and how; empty if none did.
    step: The number of completed steps at the failure; None if training had not started.
    rank: The rank that failed first; None if unknown.
    gone: Hosts that no longer answer.
    ended_at: When the first rank ended, in seconds since the epoch.
    is_killed: Whether SIGKILL has ended that rank, which its own code rarely sends.
    """

    kind: Kind
    reason: str = ""
    step: int | None = None
    rank: int | None = None
    gone: list[str] = field(default_factory=list)
    is_killed: bool = False
    ended_at: float = 0.0


def classify_exit(status: int, output: str, statuses: Sequence[RankStatus], ranks: int, launcher: str) -> Outcome:
    """Classify how an attempt ended.

    Args:
        status: The launcher's exit status; negative if a signal killed it.
        output: The launcher's output.
        statuses: The status records of all ranks that registered.
        ranks: The number of ranks started.
        launcher: Its name and process id, for messages.
    """
    # The ranks' records are more reliable than the launcher's status: Open MPI's launcher exits with 0 when it has lost
    # a host, and with an error if a library crashes after training has finished.
    ended_well = status in (0, os.EX_TEMPFAIL)
    # A script may raise an exception after it has trained.
    done = all(
        rank_status.done and (not rank_status.error or is_secondary_error(rank_status)) for rank_status in statuses
    )
    if statuses and done and (ended_well or len(statuses) >= ranks):
        # When one rank exits with an error, a launcher kills the others after a short time.
        exits = [
            rank_exit
            for rank_exit in recorded_exits(statuses)
            if rank_exit.signal not in (0, signal.SIGTERM, signal.SIGKILL)
        ]
        reason = f"{describe_exit(exits[0], statuses, ranks)}; everything was saved" if exits else ""
        return Outcome("stopped" if any(rank_status.stopped for rank_status in statuses) else "finished", reason)
    if not statuses and ended_well and not parse_lost_hosts(output):
        return Outcome("stopped" if status else "finished")
    if any(rank_status.is_user_error for rank_status in statuses):
        return Outcome("user error")
    step = _step_of(statuses)
    failed, exits, lost = first_error(statuses), recorded_exits(statuses), parse_lost_hosts(output)
    is_program = any(rank_status.is_program for rank_status in statuses)
    # The ranks of a program record how they ended; of exits that may follow from another one, the first is the cause.
    caused = lost or (exits and (is_program or not is_secondary(exits[0])) and exits[0].rank != _rank_of(failed))
    if failed is not None and not (caused and is_secondary_error(failed)):
        step = _step_of([failed])
        return Outcome("failed", describe_error(failed, statuses, ranks), step, failed.rank)
    early = first_to_finish(statuses)
    if early is not None and status >= 0 and not lost and _launcher_ended_others(early, exits, output, statuses):
        return Outcome("failed", describe_early_exit(early, ranks), _step_of([early]), early.rank)
    exits = exits or parse_exits(output)
    if statuses and lost and (not exits or is_secondary(exits[0])):
        return Outcome("failed", f"{launcher}, lost contact with {lost}{_at(step, is_program)}", step)
    if exits:
        rank_status = find_status(exits[0], statuses)
        if rank_status is not None and rank_status.ready and rank_status.role != "ps":
            step = _step_of([rank_status])
        rank = exits[0].rank if rank_status is None else rank_status.rank
        is_killed = exits[0].signal == signal.SIGKILL
        return Outcome("failed", describe_exit(exits[0], statuses, ranks), step, rank, is_killed=is_killed)
    how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    if not statuses:
        return Outcome("not begun", f"{launcher}, {how} before any rank started")
    return Outcome("failed", f"{launcher}, {how}{_at(step, is_program)}", step)


def _launcher_ended_others(
    early: RankStatus, exits: Sequence[RankExit], output: str, statuses: Sequence[RankStatus]
) -> bool:
    """Return whether the launcher has ended the other ranks because ``early`` had exited."""
    if any(rank_exit.signal != signal.SIGTERM for rank_exit in exits):
        return False
    if any(status.signal and status.ended_at > early.ended_at + _CLEANUP_S for status in statuses):
        return False
    return bool(exits) or all(find_status(rank_exit, statuses) in (None, early) for rank_exit in parse_exits(output))


def _step_of(statuses: Sequence[RankStatus]) -> int | None:
    """Return the last completed step; None before training, and for a program that has reported none."""
    steps = [status.step for status in statuses if status.ready and (status.step or not status.is_program)]
    return max(steps, default=None)


def _rank_of(status: RankStatus | None) -> int | None:
    return None if status is None else status.rank


def _at(step: int | None, is_program: bool) -> str:
    if is_program:
        return "" if step is None else f", after step {step:,}"
    return " before training started" if step is None else f", in step {step + 1:,}"


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
    if before is None or now.gone or before.gone or now.is_killed:
        return ""
    if now.step is None and before.step is None:
        return "it failed twice before training started"
    if now.step is not None and before.step is not None and abs(now.step - before.step) <= ranks:
        return f"it failed twice in step {now.step + 1:,}"
    return ""
