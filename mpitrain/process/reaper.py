"""A process that waits for its rank and notes how it ended, where ``mpitrain run`` looks for that.

Launchers tell of processes that were killed in a way of their own each, and where ranks notice the death of another
one by themselves, as those on other hosts do when a connection is closed, they tell of the wrong one. The process
that the launcher has started knows for certain: it becomes the attendant, and the rank is its child.
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
    """Return in a child, which is the rank from here on; this process waits for it, and ends in the same way.

    To be called before MPI starts. Where the attendant is killed, the kernel kills the rank, and where the launcher is,
    the kernel kills both.
    """
    end_with_parent(signal.SIGKILL)  # a launcher that is killed ends no ranks
    launched = os.getpid()
    child = os.fork()
    if not child:
        end_with_parent(signal.SIGKILL)
        if os.getppid() != launched:  # it has been killed meanwhile
            os._exit(1)
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    os.waitid(
        os.P_PID, child, os.WEXITED | os.WNOWAIT
    )  # its number stays its own until no signal is passed on any more
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    _, how = os.waitpid(child, 0)
    killed_by = os.WTERMSIG(how) if os.WIFSIGNALED(how) else 0
    status = 0 if killed_by else os.WEXITSTATUS(how)
    rank_status.record_end(run_dir, rank, child, killed_by, status)
    if killed_by:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank may have left one, which is the one to look at
        if killed_by in _PASSED_ON:
            signal.signal(killed_by, signal.SIG_DFL)
        os.kill(os.getpid(), killed_by)
        os._exit(128 + killed_by)  # after one that is ignored here
    os._exit(status)


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the one that started it ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
