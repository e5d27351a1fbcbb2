"""What launchers say of processes that ended, and what is told of it: which rank, what it was, where, how."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from ..process.rank_status import Entry

# Open MPI's launcher, 4 and 5; Intel MPI's; MPICH's.
_OPEN_MPI_SIGNAL = re.compile(r"process rank (\d+)\s+with PID (\d+)\s+on node (\S+)\s+exited\s+on\s+signal (\d+)")
_OPEN_MPI_STATUS = re.compile(r"Process name: \[\S+?,(\d+)\]\s+Exit code:\s+(\d+)")
_INTEL = re.compile(r"=\s+RANK (\d+) PID (\d+) RUNNING AT (\S+)\s+=\s+(?:KILLED BY SIGNAL|EXIT STATUS): (\d+)( \()?")
_MPICH = re.compile(r"=\s+PID (\d+) RUNNING AT (\S+)\s+=\s+EXIT CODE: (\d+)")
_LOST = re.compile(r"Remote daemon\s*:\s*\S+ on node (\S+)|Remote host:\s+(\S+)\s+Daemon exit status")
_LOST_SOME = "assert (!closed) failed"  # MPICH's launcher does not say which one

# What most often sends them, where it is not the program's own defect.
_OFTEN = {
    signal.SIGKILL: "often by the kernel, for want of memory",
    signal.SIGBUS: "often for want of room in /dev/shm",
    signal.SIGXCPU: "its limit on CPU time",
}


class Death(NamedTuple):
    """That a process ended.

    Attributes:
        rank, pid: None where the launcher did not say.
        signal: That it was killed by; 0 for none.
        status: That it exited with, where it was not killed.
    """

    rank: int | None
    pid: int | None
    host: str
    signal: int
    status: int


def read_deaths(said: str) -> list[Death]:
    """The processes whose end a launcher tells of, those that were killed by its cleaning up last."""
    found = [Death(int(r), int(p) or None, h, int(s), 0) for r, p, h, s in _OPEN_MPI_SIGNAL.findall(said)]
    found += [Death(int(r), None, "", 0, int(s)) for r, s in _OPEN_MPI_STATUS.findall(said)]
    for rank, pid, host, number, by_signal in _INTEL.findall(said):
        found.append(Death(int(rank), int(pid), host, *((int(number), 0) if by_signal else (0, int(number)))))
    if not found:
        for pid, host, number in _MPICH.findall(said):
            by_signal = f"(signal {number})" in said
            found.append(Death(None, int(pid), host, *((int(number), 0) if by_signal else (0, int(number)))))
    return sorted(found, key=lambda death: death.signal in (signal.SIGKILL, signal.SIGTERM))


def read_lost(said: str) -> str:
    """Which hosts a launcher says it has lost, in words; empty where it says nothing of the kind."""
    names = dict.fromkeys(one or other for one, other in _LOST.findall(said))
    if names:
        return f"host{'s' * (len(names) > 1)} {' and '.join(names)}"
    return "one of its hosts" if _LOST_SOME in said else ""


def noted_deaths(entries: Sequence[Entry]) -> list[Death]:
    """The ranks that were seen to end badly, the one that began it first.

    A rank that loses its connection to another one ends with a status or aborts: where any was killed otherwise, it
    comes before those. What the launcher kills when it cleans up it kills with what saw it.
    """
    bad = [entry for entry in entries if entry.ended_at and (entry.signal or entry.status)]
    bad.sort(key=lambda entry: (_may_follow(entry.signal), entry.ended_at))
    return [Death(entry.rank, entry.pid, entry.host, entry.signal, entry.status) for entry in bad]


def first_error(entries: Sequence[Entry]) -> Entry | None:
    """A rank that ended with an exception, rather not one of MPI's own: others meet those when a rank is gone."""
    failed = sorted((entry for entry in entries if entry.error), key=lambda entry: error_may_follow(entry))
    return failed[0] if failed else None


def error_may_follow(entry: Entry) -> bool:
    """Whether ranks meet this rank's exception because of another one's end, too."""
    return entry.error.startswith("mpi4py.MPI.Exception: ")


def may_follow(death: Death) -> bool:
    """Whether ranks end so because of another one's end, too."""
    return _may_follow(death.signal)


def _may_follow(number: int) -> bool:
    return number in (0, signal.SIGABRT, signal.SIGTERM)


def find(death: Death, entries: Sequence[Entry]) -> Entry | None:
    """The rank that died, as it had signed in."""
    for entry in entries:
        if entry.rank == death.rank or (death.rank is None and death.pid in (entry.pid, entry.attendant)):
            return entry
    return None


def tell(death: Death, entries: Sequence[Entry], ranks: int) -> str:
    """A line about the process that died."""
    entry = find(death, entries)
    if entry is None:
        who = "a process" if death.rank is None else f"rank {death.rank} of {ranks}"
        where = f" on {death.host}" if death.host else ""
        number = f", process {death.pid}" if death.pid else ""
        return f"{who}{where}{number}, {_how(death)} before training had begun"
    return f"{_name(entry, ranks)}, {_how(death)}{_when(entry, entries)}"


def tell_error(entry: Entry, entries: Sequence[Entry], ranks: int) -> str:
    """A line about a rank that ended with an exception."""
    return f"{_name(entry, ranks)}, ended with {entry.error.splitlines()[0]}{_when(entry, entries)}"


def _name(entry: Entry, ranks: int) -> str:
    role = f" ({entry.role} {entry.task})" if entry.role else ""
    return f"rank {entry.rank} of {ranks}{role} on {entry.host}, process {entry.pid}"


def _how(death: Death) -> str:
    if not death.signal:
        return f"ended with status {death.status}"
    try:
        name = signal.Signals(death.signal).name
    except ValueError:
        name = "an unknown one"
    often = f"; {_OFTEN[signal.Signals(death.signal)]}" if death.signal in list(_OFTEN) else ""
    return f"was killed by signal {death.signal} ({name}{often})"


def _when(entry: Entry, entries: Sequence[Entry]) -> str:
    if not entry.ready:
        return " before training had begun"
    if entry.done:
        return " after its last step"
    # A server takes no steps of its own.
    step = max((other.step for other in entries), default=0) if entry.role == "ps" else entry.step
    return f", in step {step + 1:,}"
