"""Parse the output of launchers about ended processes, and describe which rank ended, where and how."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from ..core.words import input_hint
from ..process.rank_status import RankStatus
from ..process.reaper import EXITED, HANGS

# The output of the launchers of Open MPI 4 and 5, of Intel MPI, and of MPICH.
_OPEN_MPI_SIGNAL = re.compile(r"process rank (\d+)\s+with PID (\d+)\s+on node (\S+)\s+exited\s+on\s+signal (\d+)")
_OPEN_MPI_STATUS = re.compile(r"Process name: \[\S+?,(\d+)\]\s+Exit code:\s+(\d+)")
_INTEL = re.compile(r"=\s+RANK (\d+) PID (\d+) RUNNING AT (\S+)\s+=\s+(?:KILLED BY SIGNAL|EXIT STATUS): (\d+)( \()?")
_MPICH = re.compile(r"=\s+PID (\d+) RUNNING AT (\S+)\s+=\s+EXIT CODE: (\d+)")
_LOST = re.compile(r"Remote daemon\s*:\s*\S+ on node (\S+)|Remote host:\s+(\S+)\s+Daemon exit status")
_LOST_RANK = ("mpi4py.MPI.Exception: ", "mpitrain.errors.CollectiveFailed: ", "mpitrain.errors.HorovodInternalError: ")
_LOST_PEER = re.compile(r"Connection closed by peer|Connection reset by peer|Broken pipe|failed to recv, got 0 bytes")
_LOST_SOME = "assert (!closed) failed"  # MPICH's launcher does not name the host

# The usual cause of a signal that the program did not raise itself.
_OFTEN = {
    signal.SIGKILL: "often the kernel's out-of-memory killer",
    signal.SIGBUS: "often because /dev/shm is full",
    signal.SIGXCPU: "the CPU time limit was exceeded",
}


class RankExit(NamedTuple):
    """The end of a process.

    Attributes:
        rank, pid: None if the launcher did not report it.
        signal: The signal that killed the process; 0 for none.
        status: The exit status of a process that was not killed.
    """

    rank: int | None
    pid: int | None
    host: str
    signal: int
    status: int

    @property
    def is_secondary(self) -> bool:
        """Whether this can be a consequence of another rank's exit."""
        if not self.signal:
            return self.status not in (HANGS, EXITED)
        return self.signal in (signal.SIGABRT, signal.SIGTERM)


def parse_exits(output: str) -> list[RankExit]:
    """Return the ended processes in a launcher's output; processes killed by SIGTERM or SIGKILL come last."""
    exits = [RankExit(int(r), int(p) or None, h, int(s), 0) for r, p, h, s in _OPEN_MPI_SIGNAL.findall(output)]
    exits += [RankExit(int(r), None, "", 0, int(s)) for r, s in _OPEN_MPI_STATUS.findall(output)]
    for rank, pid, host, number, by_signal in _INTEL.findall(output):
        exits.append(RankExit(int(rank), int(pid), host, *((int(number), 0) if by_signal else (0, int(number)))))
    if not exits:
        for pid, host, number in _MPICH.findall(output):
            by_signal = f"(signal {number})" in output
            exits.append(RankExit(None, int(pid), host, *((int(number), 0) if by_signal else (0, int(number)))))
    return sorted(exits, key=lambda rank_exit: rank_exit.signal in (signal.SIGKILL, signal.SIGTERM))


def parse_lost_hosts(output: str) -> str:
    """Return the hosts that a launcher reports as lost, as text for a message; empty if none."""
    names = dict.fromkeys(one or other for one, other in _LOST.findall(output))
    if names:
        return f"host{'s' * (len(names) > 1)} {' and '.join(names)}"
    return "one of its hosts" if _LOST_SOME in output else ""


def recorded_exits(statuses: Sequence[RankStatus]) -> list[RankExit]:
    """Return the recorded abnormal rank exits, the likely cause first.

    A rank that loses its connection to another rank exits with a status or aborts; ranks that were killed by another
    signal are therefore sorted first. The launcher's cleanup kills ranks together with the reapers that would record
    their exit.
    """
    bad = [status for status in statuses if status.ended_at and (status.signal or status.status)]
    bad.sort(key=lambda status: (not status.hang, _exit_of(status).is_secondary, status.ended_at))
    return [_exit_of(status) for status in bad]


def _exit_of(status: RankStatus) -> RankExit:
    return RankExit(status.rank, status.pid, status.host, status.signal, status.status)


def first_error(statuses: Sequence[RankStatus]) -> RankStatus | None:
    """Return the rank that ended first with an exception; prefer exceptions that do not follow from a lost rank."""
    failed = [status for status in statuses if status.error]
    failed.sort(key=lambda status: (is_secondary_error(status), status.ended_at or math.inf))
    return failed[0] if failed else None


def is_secondary_error(status: RankStatus) -> bool:
    """Return whether a rank's exception (of MPI, gloo, a store, the backend) can follow from another rank's exit."""
    return status.error.startswith(_LOST_RANK) or _LOST_PEER.search(status.error) is not None


def find_status(rank_exit: RankExit, statuses: Sequence[RankStatus]) -> RankStatus | None:
    """Return the status record of the rank that exited, or None if it had not registered."""
    for status in statuses:
        if status.rank == rank_exit.rank or (rank_exit.rank is None and rank_exit.pid in (status.pid, status.reaper)):
            return status
    return None


def describe_exit(rank_exit: RankExit, statuses: Sequence[RankStatus], ranks: int) -> str:
    """Return a one-line description of a process exit."""
    status = find_status(rank_exit, statuses)
    if status is None:
        who = "a process" if rank_exit.rank is None else f"rank {rank_exit.rank} of {ranks}"
        where = f" on {rank_exit.host}" if rank_exit.host else ""
        number = f", process {rank_exit.pid}" if rank_exit.pid else ""
        return f"{who}{where}{number}, {_how(rank_exit)} before training started"
    how = f"{status.hang}; mpitrain ended the rank" if status.hang else _how(rank_exit)
    last_line = f"; its last line was: {status.last_line}" if status.last_line else ""
    return f"{_name(status, ranks)}, {how}{_when(status, statuses)}{last_line}"


def describe_error(status: RankStatus, statuses: Sequence[RankStatus], ranks: int) -> str:
    """Return a one-line description of a rank that ended with an exception."""
    error = status.error.splitlines()[0]
    text = f"ended with {error}{_when(status, statuses)}{input_hint(error)}"
    earlier = first_to_finish(statuses)
    if earlier is not None and earlier.ended_at < (status.ended_at or math.inf) and is_secondary_error(status):
        waited = "exited with status 0 while others waited for it"
        return f"{_name(earlier, ranks)}, {waited}; then rank {status.rank} {text}"
    return f"{_name(status, ranks)}, {text}"


def first_to_finish(statuses: Sequence[RankStatus]) -> RankStatus | None:
    """Return the rank of a program that exited with status 0 first; None if there is none."""
    finished = [status for status in statuses if status.is_program and status.done and not status.stopped]
    return min(finished, key=lambda status: status.ended_at, default=None)


def describe_early_exit(status: RankStatus, ranks: int) -> str:
    """Return a one-line description of a rank of a program whose exit made the launcher end the other ranks."""
    return (
        f"{_name(status, ranks)}, exited with status 0, and the launcher ended the other ranks; this rank probably did "
        "not call MPI_Finalize (for example because of os._exit(0))"
    )


def _name(status: RankStatus, ranks: int) -> str:
    role = f" ({status.role} {status.task})" if status.role else ""
    return f"rank {status.rank} of {ranks}{role} on {status.host}, process {status.pid}"


def _how(rank_exit: RankExit) -> str:
    if rank_exit.status == EXITED and not rank_exit.signal:
        return "exited with status 0, without finishing (such as by os._exit(0))"
    if not rank_exit.signal:
        return f"exited with status {rank_exit.status}"
    try:
        name = signal.Signals(rank_exit.signal).name
    except ValueError:
        name = "unknown"
    often = f"; {_OFTEN[signal.Signals(rank_exit.signal)]}" if rank_exit.signal in list(_OFTEN) else ""
    return f"was killed by signal {rank_exit.signal} ({name}{often})"


def _when(status: RankStatus, statuses: Sequence[RankStatus]) -> str:
    if status.is_program:
        return f", after step {status.step:,}" if status.step else ""
    if not status.is_training:
        return " before training started"
    if status.done:
        return " after its last step"
    # A server does not take steps itself.
    step = max((other.step for other in statuses), default=0) if status.role == "ps" else status.step
    return f", in step {step + 1:,}"
