"""A process on every other host of a run: answers the supervisor's heartbeats, and ends the ranks if none arrive.

The supervisor starts it with the remote agent, as a script: it needs Python's standard library only. It prints the UDP
port at which it answers. With the arguments ``end RUN_DIR FILES`` the script only ends the ranks of a run
and removes their temporary files, given as a JSON object by host.

Heartbeats are datagrams: a connection retries ever more rarely, and would notice late that the link has returned.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator

_POLL_S = 0.5
_ENDING_S = 5.0
_DAEMONS = (b"prted", b"orted", b"hydra_pmi_proxy", b"hydra_bstrap_pr")  # process names of Open MPI's and Hydra's


def watch(address: str, token: bytes, run_dir: str, timeout_s: float) -> None:
    """Answer heartbeats until standard input ends; end the run's ranks if no heartbeat arrives for ``timeout_s``.

    Args:
        address: This host's IP address, at which it answers.
        token: Begins every heartbeat of this run.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as answers:
        answers.bind(target)
        print(answers.getsockname()[1], flush=True)
        silent_s, looked_at, begun = 0.0, time.monotonic(), False
        while True:
            ready, _, _ = select.select([answers, sys.stdin], [], [], _POLL_S)
            if sys.stdin in ready and not os.read(sys.stdin.fileno(), 4096):
                return
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
                return


def end_ranks(run_dir: str) -> None:
    """Kill this host's ranks of a run, which are identified by their environment, and the daemons that started them."""
    mark = f"MPITRAIN_RUN_DIR={run_dir}".encode()
    names = [name for name in os.listdir("/proc") if name.isdigit()]
    marked = [int(name) for name in names if mark in _read(f"/proc/{name}/environ").split(b"\0") and _is_here(name)]
    ranks = [pid for pid in marked if b"-m\0mpitrain\0train" in _read(f"/proc/{pid}/cmdline")]
    # Under ssh a daemon does not have the mark.
    daemons = {daemon for pid in marked for daemon in _daemons_above(pid)}
    for pid in (*sorted(ranks), *daemons):  # a reaper first, which could otherwise report the death of its rank
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def remove(paths: Iterable[str]) -> None:
    """Remove this user's files, and directories whose name ends with the id of a process that has ended."""
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            if os.lstat(path).st_uid != os.geteuid():
                continue
            if not os.path.isdir(path):
                os.unlink(path)
            elif _has_ended(int(path.rpartition(".")[2])):
                shutil.rmtree(path, ignore_errors=True)


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended; wait a while for a launcher that is ending its ranks."""
    deadline = time.monotonic() + _ENDING_S
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    return not os.path.exists(f"/proc/{pid}")


def _daemons_above(pid: int) -> Iterator[int]:
    """Yield the launcher's daemons among the parents of a process."""
    while pid > 1:
        name, _, fields = _read(f"/proc/{pid}/stat").rpartition(b")")
        if name.partition(b"(")[2] in _DAEMONS:
            yield pid
        pid = int(fields.split()[1]) if fields else 0


def _is_here(name: str) -> bool:
    """Return whether a process is in this network namespace; another one counts as another host."""
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
        remove(json.loads(sys.argv[3]).get(socket.gethostname(), []))
    else:
        watch(sys.argv[1], sys.argv[2].encode(), sys.argv[3], float(sys.argv[4]))
