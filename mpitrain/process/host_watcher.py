"""A process on every other host of a run: answers the supervisor's heartbeats, and ends the ranks if no heartbeats
arrive.

The supervisor starts it with the remote agent, as a script that needs only Python's standard library. The script prints
the UDP port at which it answers. With the arguments ``end RUN_DIR SECONDS`` it only ends the ranks of a run, and
removes files of MPI libraries. It removes files in the host's shared memory and temporary directory that were written
in the last SECONDS.

Heartbeats are datagrams: a TCP connection retries less and less often, and would notice late that the link has
returned.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator

_POLL_S = 0.5
_ENDING_S = 5.0
# Names of files of Open MPI, MPICH, Intel MPI and UCX in /dev/shm, and of the session directories of Open MPI's
# launcher and daemons, which contain the pid. A later daemon with the same pid does not start if this directory exists.
_SHM = "/dev/shm"
_SEGMENT = re.compile(r"(sm_segment|vader_segment|osc_sm|osc_rdma|osc_ucx|mpich_shm|Intel_MPI|ucx_shm)[\w.:-]*")
_SESSION = re.compile(r"(?:ompi|prted)\.(\d+)")
_FORK_SERVER = b"mpitrain-forks\n"  # the process name of a server that forks ranks
# Variables, as ``NAME=VALUE``, with which other processes of this process's run were started.
MARKS = set[str]()
# Process names of the daemons of Open MPI and Hydra.
_DAEMONS = (b"prted", b"orted", b"hydra_pmi_proxy", b"hydra_bstrap_pr")


def watch(address: str, token: bytes, run_dir: str, timeout_s: float) -> None:
    """Answer heartbeats until standard input ends; end the run's ranks if no heartbeat arrives for ``timeout_s``.

    Then remove the ranks' leftover files.

    Args:
        address: This host's IP address, at which this process answers.
        token: The beginning of every heartbeat of this run.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as answers:
        answers.bind(target)
        print(answers.getsockname()[1], flush=True)
        silent_s, looked_at, begun, started_at = 0.0, time.monotonic(), False, time.time()
        while True:
            ready, _, _ = select.select([answers, sys.stdin], [], [], _POLL_S)
            if sys.stdin in ready and not os.read(sys.stdin.fileno(), 4096):
                break  # the supervisor has ended
            if answers in ready:
                data, sender = answers.recvfrom(512)
                if data.startswith(token):
                    silent_s, begun = 0.0, True
                    with contextlib.suppress(OSError):  # the link may be down
                        answers.sendto(data, sender)
            now = time.monotonic()
            silent_s += min(now - looked_at, 2 * _POLL_S)  # time in which this process was suspended does not count
            looked_at = now
            if begun and silent_s > timeout_s:
                end_ranks(run_dir)
                break
    remove_leftovers(run_dir, time.time() - started_at)


def end_ranks(run_dir: str) -> None:
    """Kill this host's ranks of a run, the processes that they have started, and the daemons that started the ranks."""
    processes = _processes_of(run_dir)
    # A daemon that ssh started lacks the environment variable by which ``_processes_of`` finds processes.
    daemons = {daemon for pid in processes for daemon in _daemons_above(pid)}
    signal_ranks(run_dir, signal.SIGKILL)
    for pid in [*processes, *daemons]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _ENDING_S
    while not all(map(_has_ended, daemons)) and time.monotonic() < deadline:
        time.sleep(0.02)


def signal_ranks(run_dir: str, number: signal.Signals) -> None:
    """Send a signal to this host's ranks of a run, to their reapers, and to the processes that they have started."""
    processes = _processes_of(run_dir)
    starts = [[b"-m", b"mpitrain", command] for command in (b"train", b"exec", b"measure")]
    reapers = {pid for pid in processes if _words(pid)[1:4] in starts}
    ranks = [pid for pid in processes if pid in reapers or not reapers.isdisjoint(_parents(pid))]
    for pid in sorted(ranks):  # end the reaper before its rank, because it could otherwise report the death of the rank
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def remove_leftovers(run_dir: str, within_s: float) -> None:
    """Remove leftover files of the MPI libraries of killed ranks on this host: shared memory, and Open MPI's sessions.

    A file is removed if it belongs to this user, has the name of a leftover file, and is not used. Shared memory is not
    used if no process has mapped it; a session is not used if its process has ended.

    Args:
        within_s: Only files that were written within this many seconds.
    """
    remove_unused(remove_ended_sessions(run_dir, within_s))


def remove_ended_sessions(run_dir: str, within_s: float) -> set[str]:
    """Wait for the run's processes, which are ending; remove sessions, and return the files in shared memory.

    Args:
        within_s: Only files that were written within this many seconds.
    """
    deadline, since = time.monotonic() + _ENDING_S, time.time() - within_s
    while _processes_of(run_dir) and time.monotonic() < deadline:
        time.sleep(0.05)
    remove_sessions(since)
    return {path for path in temporary_files(since) if path.startswith(_SHM)}


def remove_unused(files: set[str]) -> None:
    """Remove files in shared memory that no process has mapped; takes 0.2 s if there are files."""
    unused = set(files)
    for _ in range(2):  # checked twice: another process may be about to map a file that it has just created
        if unused:
            unused -= _mapped_files()
            time.sleep(0.1)
    for path in unused:
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_sessions(since: float) -> None:
    """Remove this user's session directories of Open MPI that were written after a time and whose process has ended."""
    for path in temporary_files(since):
        session = _SESSION.fullmatch(os.path.basename(path))
        if session is not None and _has_ended(session[1]):
            shutil.rmtree(path, ignore_errors=True)


def temporary_files(since: float) -> list[str]:
    """Return this user's files of MPI libraries, outside run directories, that were written after a time."""
    paths = []
    for folder, pattern in ((_SHM, _SEGMENT), (tempfile.gettempdir(), _SESSION)):
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                if pattern.fullmatch(entry.name) and _is_own(entry, since):
                    paths.append(entry.path)
    return paths


def _is_own(entry: os.DirEntry[str], since: float) -> bool:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return False
    return status.st_uid == os.geteuid() and status.st_mtime >= since and not entry.is_symlink()


def _has_ended(pid: int | str) -> bool:
    state = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:1]
    return state in ([], [b"Z"], [b"X"])  # also true if the parent has not noticed the end yet


def _mapped_files() -> set[str]:
    """Return the files in /dev/shm that this user's processes have mapped."""
    paths = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            for line in _read(f"/proc/{name}/maps").splitlines():
                if (at := line.find(_SHM.encode() + b"/")) > 0:
                    paths.add(os.fsdecode(line[at:]).removesuffix(" (deleted)"))
    return paths


def _daemons_above(pid: int) -> Iterator[int]:
    """Yield the launcher's daemons among a process and its ancestors."""
    for parent in (pid, *_parents(pid)):
        if _read(f"/proc/{parent}/stat").rpartition(b")")[0].partition(b"(")[2] in _DAEMONS:
            yield parent


def _parents(pid: int) -> Iterator[int]:
    """Yield the ancestors of a process, its parent first."""
    while fields := _read(f"/proc/{pid}/stat").rpartition(b")")[2].split():
        pid = int(fields[1])
        if pid <= 1:
            return
        yield pid


def _processes_of(run_dir: str) -> list[int]:
    """Return the ids of a run's processes on this host except fork servers, identified by their environment."""
    marks = {os.fsencode(mark) for mark in (f"MPITRAIN_RUN_DIR={run_dir}", *MARKS)}
    names = [name for name in os.listdir("/proc") if name.isdigit() and _read(f"/proc/{name}/comm") != _FORK_SERVER]
    environments = {name: _read(f"/proc/{name}/environ").split(b"\0") for name in names}
    of_run = [entries for entries in environments.values() if not marks.isdisjoint(entries)]
    marks |= {entry for entries in of_run for entry in entries if entry.startswith(b"MPITRAIN_FORKS=")}
    return [int(name) for name, entries in environments.items() if not marks.isdisjoint(entries) and _is_here(name)]


def _words(pid: int) -> list[bytes]:
    """Return the command line of a process."""
    return _read(f"/proc/{pid}/cmdline").split(b"\0")


def _is_here(name: str) -> bool:
    """Return whether a process is in this network namespace; another namespace counts as another host."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{name}/ns/net") == os.readlink("/proc/self/ns/net")
    return False


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # the process has ended
        return b""


if __name__ == "__main__":
    if sys.argv[1] == "end":
        end_ranks(sys.argv[2])
        remove_leftovers(sys.argv[2], float(sys.argv[3]))
    else:
        watch(sys.argv[1], sys.argv[2].encode(), sys.argv[3], float(sys.argv[4]))
