"""Classify how an attempt ended, from its result alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from ..process.rank_status import RankStatus
from .attempt import AttemptResult
from .exit_report import (
    describe_early_exit,
    describe_error,
    describe_exit,
    find_status,
    first_error,
    first_to_finish,
    is_secondary_error,
    parse_exits,
    parse_lost_hosts,
    recorded_exits,
)

_CLEANUP_S = 10.0  # after a rank has exited, a launcher that ends the other ranks does so within this time
# Signals that a fault of a host may cause, such as too little memory, or bad memory.
_OF_HOSTS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
# Open MPI's launcher fails to start if it finds the session directory of a killed launcher with the same process id.
_TRANSIENT_ERROR = "listener thread failed to start"


class Kind(Enum):
    FINISHED = auto()
    STOPPED = auto()  # stopped before the last step, because the run was asked to stop
    USER_ERROR = auto()
    FAILED = auto()
    LAUNCH_FAILED = auto()  # failed before any rank started


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        reason: A line that says which rank died, and how; empty if no rank died, or if the line has been printed.
        step: The number of completed steps at the failure; None if training had not started.
        rank: The rank that failed first; None if unknown.
        is_external: Whether SIGKILL has ended that rank or the launcher, or a host was lost: usually external reasons.
        killed_on: The host of that rank if it was killed by a signal that a fault of the host may cause; else empty.
        is_transient: Whether the launcher failed to start for a reason that may not recur.
        lost_hosts: Hosts that no longer answer.
        ended_at: When the first rank ended, in seconds since the epoch.
        traceback: The traceback of the exception that ended ``rank``; empty if unknown.
    """

    kind: Kind
    reason: str = ""
    step: int | None = None
    rank: int | None = None
    is_external: bool = False
    killed_on: str = ""
    is_transient: bool = False
    lost_hosts: Sequence[str] = ()
    ended_at: float = 0.0
    traceback: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether the attempt has failed, so that a restart may help."""
        return self.kind in (Kind.FAILED, Kind.LAUNCH_FAILED)


def classify(result: AttemptResult, ranks: int, launcher: str, is_recorded_as_stopped: bool = False) -> Outcome:
    """Classify how an attempt ended.

    Args:
        ranks: The number of ranks started.
        launcher: The launcher's name and process id, for messages.
        is_recorded_as_stopped: Whether the run's heartbeat records that it was stopped before its last step.
    """
    outcome = _classify_exit(_Evidence(result, ranks, launcher))
    if outcome.kind is Kind.FINISHED and is_recorded_as_stopped:
        outcome = Outcome(Kind.STOPPED)  # the signal also ended the launcher's daemons; the launcher then exits with 0
    if result.is_reported and outcome.kind in (Kind.STOPPED, Kind.FAILED):
        outcome = Outcome(Kind.FAILED, step=outcome.step)  # STOPPED: suspended ranks continued at the end
    return replace(
        outcome,
        is_transient=outcome.kind is Kind.LAUNCH_FAILED and (_TRANSIENT_ERROR in result.output or result.status < 0),
        lost_hosts=result.lost_hosts if outcome.has_failed else (),
        ended_at=min((status.ended_at for status in result.statuses if status.ended_at), default=result.ended_at),
        traceback="" if outcome.rank is None else result.tracebacks.get(outcome.rank, ""),
    )


class _Evidence:
    """The facts about the end of an attempt.

    Attributes:
        status: The launcher's exit status.
        output: The output of ranks and launcher.
        statuses: The records of the ranks.
        ended_at: When the launcher had ended, in seconds since the epoch.
        ranks: The number of ranks started.
        launcher: The launcher's name and process id.
        exits: The ends of ranks as far as they are recorded, the likely cause first.
        lost: The hosts that the launcher reports as lost, as text.
        is_program: Whether the ranks execute a program.
        step: The last completed step.
        ended_well: Whether the launcher's status means success.
    """

    def __init__(self, result: AttemptResult, ranks: int, launcher: str) -> None:
        self.status, self.output, self.statuses = result.status, result.output, result.statuses
        self.ended_at, self.ranks, self.launcher = result.ended_at, ranks, launcher
        self.exits, self.lost = recorded_exits(self.statuses), parse_lost_hosts(self.output)
        self.is_program = any(rank_status.is_program for rank_status in self.statuses)
        self.step = _step_of(self.statuses)
        self.ended_well = self.status in (0, os.EX_TEMPFAIL)

    @property
    def launcher_exit(self) -> str:
        """How the launcher ended."""
        how = f"was killed by signal {-self.status}" if self.status < 0 else f"exited with status {self.status}"
        return f"{self.launcher}, {how}"


def _classify_exit(evidence: _Evidence) -> Outcome:
    """Classify by exit status, output, and the records of the ranks."""
    return next(outcome for cause in _CAUSES if (outcome := cause(evidence)) is not None)


# Each of the following functions returns the outcome if its cause applies, otherwise None.


def _end_of_training(evidence: _Evidence) -> Outcome | None:
    """All ranks have finished.

    The records of the ranks are more reliable than the launcher's status: Open MPI's launcher exits with 0 when it has
    lost a host, and with an error if a library crashes after training has finished. A script may raise an exception
    after it has trained.
    """
    statuses, ranks = evidence.statuses, evidence.ranks
    done = all(
        rank_status.done and (not rank_status.error or is_secondary_error(rank_status)) for rank_status in statuses
    )
    if not statuses or not done or not (evidence.ended_well or len(statuses) >= ranks):
        return None
    # When one rank exits with an error, a launcher kills the others after a short time.
    exits = [rank_exit for rank_exit in evidence.exits if rank_exit.signal not in (0, signal.SIGTERM, signal.SIGKILL)]
    reason = f"{describe_exit(exits[0], statuses, ranks)}; everything was saved" if exits else ""
    return Outcome(Kind.STOPPED if any(rank_status.stopped for rank_status in statuses) else Kind.FINISHED, reason)


def _end_without_ranks(evidence: _Evidence) -> Outcome | None:
    """The launcher has succeeded without starting a rank."""
    if evidence.statuses or not evidence.ended_well or evidence.lost:
        return None
    return Outcome(Kind.STOPPED if evidence.status else Kind.FINISHED)


def _user_error(evidence: _Evidence) -> Outcome | None:
    """A rank has reported a user error."""
    return Outcome(Kind.USER_ERROR) if any(status.is_user_error for status in evidence.statuses) else None


def _exception(evidence: _Evidence) -> Outcome | None:
    """A rank has ended with an exception that does not follow from the end of another rank or host.

    Ranks of a program record how they ended. The records are sorted by how likely they are the cause. The first record
    is therefore used, even if this rank's exit may be a consequence of another rank's exit.
    """
    failed, exits = first_error(evidence.statuses), evidence.exits
    if failed is None:
        return None
    follows = evidence.lost or (
        exits and (evidence.is_program or not exits[0].is_secondary) and exits[0].rank != failed.rank
    )
    if follows and is_secondary_error(failed):
        return None
    reason = describe_error(failed, evidence.statuses, evidence.ranks)
    return Outcome(Kind.FAILED, reason, _step_at_end(failed, evidence), failed.rank)


def _early_exit(evidence: _Evidence) -> Outcome | None:
    """A rank of a program has exited with status 0, and therefore the launcher has ended the others."""
    early = first_to_finish(evidence.statuses)
    if early is None or evidence.status < 0 or evidence.lost:
        return None
    if not _launcher_ended_others(early, evidence):
        return None
    return Outcome(Kind.FAILED, describe_early_exit(early, evidence.ranks), _step_of([early]), early.rank)


def _lost_host(evidence: _Evidence) -> Outcome | None:
    """The launcher has lost a host, and no rank has ended for another reason."""
    exits = evidence.exits or parse_exits(evidence.output)
    if not evidence.statuses or not evidence.lost or (exits and not exits[0].is_secondary):
        return None
    when = _at(evidence.step, evidence.is_program)
    reason = f"{evidence.launcher}, lost contact with {evidence.lost}{when}"
    return Outcome(Kind.FAILED, reason, evidence.step, is_external=True)


def _rank_exit(evidence: _Evidence) -> Outcome | None:
    """A rank has exited with an error, or was killed."""
    exits, statuses = evidence.exits or parse_exits(evidence.output), evidence.statuses
    if not exits:
        return None
    rank_status = find_status(exits[0], statuses)
    step = _step_at_end(rank_status, evidence)
    rank = exits[0].rank if rank_status is None else rank_status.rank
    is_external, is_of_host = exits[0].signal == signal.SIGKILL, exits[0].signal in _OF_HOSTS
    killed_on = rank_status.host if rank_status is not None and is_of_host and not rank_status.hang else ""
    reason = describe_exit(exits[0], statuses, evidence.ranks)
    return Outcome(Kind.FAILED, reason, step, rank, is_external=is_external, killed_on=killed_on)


def _launcher_exit(evidence: _Evidence) -> Outcome:
    """The launcher itself has failed."""
    is_external = evidence.status == -signal.SIGKILL
    if not evidence.statuses:
        reason = f"{evidence.launcher_exit} before any rank started"
        return Outcome(Kind.LAUNCH_FAILED, reason, is_external=is_external)
    reason = f"{evidence.launcher_exit}{_at(evidence.step, evidence.is_program)}"
    return Outcome(Kind.FAILED, reason, evidence.step, is_external=is_external)


_CAUSES: tuple[Callable[[_Evidence], Outcome | None], ...] = (
    _end_of_training,
    _end_without_ranks,
    _user_error,
    _exception,
    _early_exit,
    _lost_host,
    _rank_exit,
    _launcher_exit,
)


def _launcher_ended_others(early: RankStatus, evidence: _Evidence) -> bool:
    """Return whether the launcher has ended the other ranks because ``early`` had exited."""
    statuses, until = evidence.statuses, early.ended_at + _CLEANUP_S
    if any(rank_exit.signal != signal.SIGTERM for rank_exit in evidence.exits):
        return False
    if any(status.signal and status.ended_at > until for status in statuses):
        return False
    if evidence.exits:
        return True
    # MPICH's launcher reports the ranks that it has killed together with their reapers.
    reported = [each for each in parse_exits(evidence.output) if find_status(each, statuses) not in (None, early)]
    return not reported or (
        evidence.ended_at < until and all(each.rank is None and each.signal == signal.SIGKILL for each in reported)
    )


def _step_of(statuses: Sequence[RankStatus]) -> int | None:
    """Return the last step that workers have completed; None before training, or if programs have reported none."""
    workers = [status for status in statuses if status.is_training and status.role != "ps"]
    return max((status.step for status in workers if status.step or not status.is_program), default=None)


def _step_at_end(status: RankStatus | None, evidence: _Evidence) -> int | None:
    """Return the last step that a rank has completed; that of all ranks if this rank is unknown or a server."""
    step = None if status is None else _step_of([status])
    return evidence.step if step is None else step


def _at(step: int | None, is_program: bool) -> str:
    if is_program:
        return "" if step is None else f", after step {step:,}"
    return " before training started" if step is None else f", in step {step + 1:,}"
