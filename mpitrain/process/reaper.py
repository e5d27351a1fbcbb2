"""The reaper: a process that waits for its rank, and records how it ended for ``mpitrain run``.

Each launcher reports killed processes in its own format, and names the wrong rank if others notice the death first, as
ranks on other hosts do when a connection closes. Only the parent of the rank's process receives its exit status. The
process that the launcher started therefore becomes the reaper, and the rank is its child.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from pathlib import Path
from types import FrameType

from . import rank_status

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def become_reaper(run_dir: Path, rank: int) -> None:
    """Fork; return in the child, which becomes the rank. The parent waits for it, and ends in the same way.

    Call before MPI starts. If the reaper is killed, the kernel kills the rank; if the launcher is killed, both.
    """
    end_with_parent(signal.SIGKILL)  # a killed launcher does not end its ranks
    launched = os.getpid()
    child = os.fork()
    if not child:
        end_with_parent(signal.SIGKILL)
        if os.getppid() != launched:  # the reaper died before prctl took effect
            os._exit(1)
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    # Without reaping: the process id must not be reused while signals are still forwarded.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    _, how = os.waitpid(child, 0)
    killed_by = os.WTERMSIG(how) if os.WIFSIGNALED(how) else 0
    status = 0 if killed_by else os.WEXITSTATUS(how)
    rank_status.record_end(run_dir, rank, child, killed_by, status)
    if killed_by:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # only the rank's core dump is of interest
        if killed_by in _PASSED_ON:
            signal.signal(killed_by, signal.SIG_DFL)
        os.kill(os.getpid(), killed_by)
        os._exit(128 + killed_by)  # if the signal is ignored here
    os._exit(status)


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
