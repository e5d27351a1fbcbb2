"""Classify how an attempt ended, from its result alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from ..process.rank_status import RankStatus
from .attempt import AttemptResult
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

_CLEANUP_S = 10.0  # within which a launcher ends the other ranks
# Open MPI's launcher fails to start if it finds the session directory of a killed launcher with the same process id.
_TRANSIENT_ERROR = "listener thread failed to start"


class Kind(Enum):
    FINISHED = auto()
    STOPPED = auto()  # before the last step, because the run was asked to
    USER_ERROR = auto()
    FAILED = auto()
    LAUNCH_FAILED = auto()  # before any rank started


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        reason: A line about which rank died and how; empty if none did, or if it has been printed.
        step: The number of completed steps at the failure; None if training had not started.
        rank: The rank that failed first; None if unknown.
        is_killed: Whether SIGKILL has ended that rank, or the launcher; their own code rarely sends it.
        is_transient: Whether the launcher failed to start for a reason that may not recur.
        lost_hosts: Hosts that no longer answer.
        ended_at: When the first rank ended, in seconds since the epoch.
        traceback: Of the exception that ended ``rank``; empty if unknown.
    """

    kind: Kind
    reason: str = ""
    step: int | None = None
    rank: int | None = None
    is_killed: bool = False
    is_transient: bool = False
    lost_hosts: Sequence[str] = ()
    ended_at: float = 0.0
    traceback: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether a restart may help."""
        return self.kind in (Kind.FAILED, Kind.LAUNCH_FAILED)


def classify(result: AttemptResult, ranks: int, launcher: str, is_recorded_as_stopped: bool = False) -> Outcome:
    """Classify how an attempt ended.

    Args:
        ranks: The number of ranks started.
        launcher: Its name and process id, for messages.
        is_recorded_as_stopped: Whether the run's heartbeat records that it was stopped before its last step.
    """
    outcome = _classify_exit(result.status, result.output, result.statuses, ranks, launcher)
    if outcome.kind is Kind.FINISHED and is_recorded_as_stopped:
        outcome = Outcome(Kind.STOPPED)  # the signal also ended the launcher's daemons, and it exits with 0 then
    if result.is_reported and outcome.kind in (Kind.STOPPED, Kind.FAILED):
        outcome = Outcome(Kind.FAILED, step=outcome.step)  # stopped: the launcher continued the ranks
    return replace(
        outcome,
        is_transient=outcome.kind is Kind.LAUNCH_FAILED and (_TRANSIENT_ERROR in result.output or result.status < 0),
        lost_hosts=result.lost_hosts if outcome.has_failed else (),
        ended_at=min((status.ended_at for status in result.statuses if status.ended_at), default=result.ended_at),
        traceback="" if outcome.rank is None else result.tracebacks.get(outcome.rank, ""),
    )


def _classify_exit(status: int, output: str, statuses: Sequence[RankStatus], ranks: int, launcher: str) -> Outcome:
    """Classify by exit status, output, and the records of the ranks."""
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
        return Outcome(Kind.STOPPED if any(rank_status.stopped for rank_status in statuses) else Kind.FINISHED, reason)
    if not statuses and ended_well and not parse_lost_hosts(output):
        return Outcome(Kind.STOPPED if status else Kind.FINISHED)
    if any(rank_status.is_user_error for rank_status in statuses):
        return Outcome(Kind.USER_ERROR)
    step = _step_of(statuses)
    failed, exits, lost = first_error(statuses), recorded_exits(statuses), parse_lost_hosts(output)
    is_program = any(rank_status.is_program for rank_status in statuses)
    # Ranks of a program record how they ended. The first record is used even if its exit can be a consequence of
    # another rank's exit: the records are sorted by how likely they are the cause.
    caused = lost or (exits and (is_program or not is_secondary(exits[0])) and exits[0].rank != _rank_of(failed))
    if failed is not None and not (caused and is_secondary_error(failed)):
        step = _step_of([failed])
        return Outcome(Kind.FAILED, describe_error(failed, statuses, ranks), step, failed.rank)
    early = first_to_finish(statuses)
    if early is not None and status >= 0 and not lost and _launcher_ended_others(early, exits, output, statuses):
        return Outcome(Kind.FAILED, describe_early_exit(early, ranks), _step_of([early]), early.rank)
    exits = exits or parse_exits(output)
    if statuses and lost and (not exits or is_secondary(exits[0])):
        return Outcome(Kind.FAILED, f"{launcher}, lost contact with {lost}{_at(step, is_program)}", step)
    if exits:
        rank_status = find_status(exits[0], statuses)
        if rank_status is not None and rank_status.ready and rank_status.role != "ps":
            step = _step_of([rank_status])
        rank = exits[0].rank if rank_status is None else rank_status.rank
        is_killed = exits[0].signal == signal.SIGKILL
        return Outcome(Kind.FAILED, describe_exit(exits[0], statuses, ranks), step, rank, is_killed=is_killed)
    how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    if not statuses:
        reason = f"{launcher}, {how} before any rank started"
        return Outcome(Kind.LAUNCH_FAILED, reason, is_killed=status == -signal.SIGKILL)
    reason = f"{launcher}, {how}{_at(step, is_program)}"
    return Outcome(Kind.FAILED, reason, step, is_killed=status == -signal.SIGKILL)


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
