"""The reaper: a process that watches its rank, ends it if it hangs, and records how it ended for ``mpitrain run``.

Each launcher reports killed processes in its own format. It may name the wrong rank if other ranks react to the death
first, for example ranks on other hosts when a connection closes. Only the parent of the rank's process receives its
exit status. The process that the launcher started therefore becomes the reaper, and the rank is its child.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import select
import signal
import socket
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import NoReturn

from ..core import activity
from . import rank_status, stacks
from .pid import parent_of, process_state
from .watchdog import Watchdog, describe

HANGS = 124  # exit status of a rank that its reaper has ended because it hangs; the same as that of timeout(1)
EXITED = 125  # exit status of a rank that exited with status 0 before it was done, such as by os._exit(0)
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
STACKS_SIGNAL = signal.SIGRTMIN + 7  # makes a rank write its Python stacks
_POLL_S = 0.5
_WHILE_S = 1.0  # an activity that lasts longer is recorded for ``mpitrain run``
_WRITING_S = 1.0  # maximum time for a rank to write its stacks
_ENDING_S = 5.0  # maximum time for the report, and for a killed rank to end
_CLOSING_MS = 300  # maximum time for Hydra to notice that the connection of a rank is closed
_STATES = {"T": "stopped by a signal", "D": "in an uninterruptible system call"}


def become_reaper(run_dir: Path | None, rank: int) -> None:
    """Fork; return in the child, which becomes the rank. The parent waits for it, and ends in the same way.

    Call before MPI starts. If the reaper is killed, the kernel kills the rank; if the launcher is killed, the kernel
    kills both.

    Args:
        run_dir: The directory in which ``mpitrain run`` reads the ranks' status files; None if it did not start this
            rank.
    """
    end_with_parent(signal.SIGKILL)  # a killed launcher does not end its ranks
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the launcher may have ignored it
    page, file = activity.ActivityPage(), os.memfd_create("stacks")
    child = fork_rank()
    if child:
        Reaper(run_dir, rank, child, page, file).run()
    activity.write_to(page)
    faulthandler.register(STACKS_SIGNAL, file=file)
    page.stacks_pid = os.getpid()


def fork_rank() -> int:
    """Fork, and return 0 in the child. The kernel kills the child if this process, the reaper, ends."""
    reaper = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, *PASSED_ON))  # no signal must be lost
    child = os.fork()
    if child:
        return child
    end_with_parent(signal.SIGKILL)
    if os.getppid() != reaper:  # the reaper died before prctl took effect
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD, *PASSED_ON))
    return 0


def survive_hydra() -> int:
    """Under Hydra, continue in a child, which outlives this process; return the process id that Hydra knows.

    When a rank calls MPI_Abort, Hydra kills its children at once, and with them what they have not yet copied of the
    output of their ranks.
    """
    known = os.getpid()
    if "MPI_LOCALNRANKS" not in os.environ:
        return known
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = fork_rank()
    if not child:
        os.setsid()  # Hydra kills the process group
        return known
    end_with_parent(signal.SIGKILL)
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        number = signal.sigwait((signal.SIGCHLD, *PASSED_ON))
        if number != signal.SIGCHLD:
            os.kill(child, number)
    _, how = os.waitpid(child, 0)
    exit_like(os.WTERMSIG(how) if os.WIFSIGNALED(how) else 0, os.WEXITSTATUS(how))


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)


def exit_like(killed_by: int, status: int) -> NoReturn:
    """End this process with a signal, or with an exit status."""
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    if killed_by:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # only the rank's core dump is of interest
        if killed_by in PASSED_ON:
            signal.signal(killed_by, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        os.kill(os.getpid(), killed_by)
        os._exit(128 + killed_by)  # reached if the signal is ignored here
    _close_connection_to_hydra()
    os._exit(status)


class Reaper:
    """The reaper's work after the fork.

    A subclass may override ``look``, ``pass_on`` and ``end``.

    Args:
        page: The memory in which the rank marks its activities.
        file: The descriptor of a file to which the rank writes its Python stacks.
    """

    def __init__(self, run_dir: Path | None, rank: int, child: int, page: activity.ActivityPage, file: int) -> None:
        self.run_dir, self.rank, self.child, self.page = run_dir, rank, child, page
        self._file, self._watchdog = file, Watchdog()
        self._polls, self._printed, self._stopped_s = 0, "", 0.0
        self._recorded: rank_status.LongActivity | None = None

    def run(self) -> None:
        """Wait for the rank's end, and end in the same way; does not return."""
        polled_at = time.monotonic()
        # WNOWAIT: the process id must not be reused while signals are still passed on.
        while os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            received = signal.sigtimedwait((signal.SIGCHLD, *PASSED_ON), _POLL_S)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self.pass_on(received.si_signo)
            now = time.monotonic()
            if now >= polled_at + _POLL_S:
                # Time in which the reaper could not run does not count: its rank may have been suspended, too.
                try:
                    self.look()
                    self._watch(min(now - polled_at, 2 * _POLL_S))
                except Exception as error:  # the rank must not end because it cannot be watched
                    self._print_once(f"mpitrain: rank {self.rank} is not watched: {type(error).__name__}: {error}")
                polled_at = now
        _, how = os.waitpid(self.child, 0)
        killed_by = os.WTERMSIG(how) if os.WIFSIGNALED(how) else 0
        status = 0 if killed_by else os.WEXITSTATUS(how)
        self.end(killed_by, status)

    def look(self) -> None:
        """Called every half second while the rank runs."""

    def pass_on(self, number: int) -> None:
        """Pass a signal on to the rank."""
        self.signal_rank(number)

    def signal_rank(self, number: int) -> None:
        """Send the rank a signal; a stopped rank continues, because it could not act on the signal."""
        os.kill(self.child, number)
        if process_state(self.child) == "T":
            os.kill(self.child, signal.SIGCONT)

    def end(self, killed_by: int, status: int) -> NoReturn:
        """Record how the rank ended, and end in the same way.

        Args:
            killed_by: The signal that killed the rank; 0 for none.
            status: The exit status of a rank that was not killed.
        """
        if not killed_by and not status and self.page.read().kinds[:1] != ("done",):
            status = EXITED  # launchers ignore status 0, and the other ranks would wait forever
        if self.run_dir is not None:
            rank_status.record_end(self.run_dir, self.rank, self.child, killed_by, status)
            if killed_by and killed_by not in (*PASSED_ON, signal.SIGABRT):
                rank_status.record_failed(self.run_dir)
        exit_like(killed_by, status)

    def _watch(self, elapsed_s: float) -> None:
        """Look at the rank once; do not return if it hangs."""
        seen, state = self.page.read(), process_state(self.child)
        if state == "t":
            return  # in a debugger
        self._answer(seen, state)
        self._stopped_s = self._stopped_s + elapsed_s if state == "T" else 0.0
        if self._stopped_s > _WHILE_S:
            how = f"kill -CONT {self.child} continues it, and Ctrl-C ends the run"
            self._print_once(f"mpitrain: rank {self.rank} on {socket.gethostname()} is stopped by a signal; {how}")
        hangs = self._watchdog.hangs(seen, state == "T", elapsed_s)
        if self._watchdog.idle_s < _WHILE_S or not self._watchdog.is_informed(seen):
            self._record(None)
        else:
            self._record(rank_status.LongActivity(_doing(seen, state), self._watchdog.is_busy(seen, state == "T")))
        if hangs:
            self._end_hanging(seen, state)

    def _end_hanging(self, seen: activity.Activity, state: str) -> None:
        """Report the rank, and end it and this process."""
        hang = f"made no progress for {self._watchdog.idle_s:.0f} s: {_doing(seen, state)}"
        role = f" ({seen.facts['role']})" if seen.facts.get("role") else ""
        report = f"mpitrain: rank {self.rank}{role} on {socket.gethostname()}, process {self.child}, {hang}"
        report += "\n" + textwrap.indent(self._read_stacks(), "  ")
        if self.run_dir is not None:
            rank_status.record_hang(self.run_dir, self.rank, self.child, hang)
        os.kill(self.child, signal.SIGKILL)
        # In a thread, as standard error may be a full pipe.
        writing = threading.Thread(target=_print_error, args=(report,), daemon=True)
        writing.start()
        writing.join(_ENDING_S)
        deadline = time.monotonic() + _ENDING_S  # a process in an uninterruptible system call does not end
        while os.waitpid(self.child, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        self.end(0, HANGS)

    def _answer(self, seen: activity.Activity, state: str) -> None:
        """Answer ``mpitrain stacks``."""
        self._polls += 1
        run_dir = seen.facts.get("run_dir")
        if run_dir is None or self._polls % 2 or not stacks.is_asked(Path(run_dir), self.rank):
            return
        text = self._read_stacks() if state != "T" else ""
        who = (self.rank, seen.facts.get("role", ""), socket.gethostname(), self.child, state, seen.step)
        doing = (_doing(seen, state), self._watchdog.idle_s, seen.waits_for)
        stacks.answer(Path(run_dir), stacks.RankStacks(*who, *doing, text))

    def is_descendant(self, pid: int) -> bool:
        """Return whether a process descends from this one."""
        while pid > 1 and pid != os.getpid():
            pid = parent_of(pid)
        return pid == os.getpid()

    def _print_once(self, line: str) -> None:
        if line != self._printed:
            self._printed = line
            _print_error(line + "\n")

    def _record(self, doing: rank_status.LongActivity | None) -> None:
        if self.run_dir is not None and doing != self._recorded:
            rank_status.record_activity(self.run_dir, self.rank, doing)
            self._recorded = doing

    def _read_stacks(self) -> str:
        """Return the Python stacks of the rank's threads; empty if no process of the rank can write them."""
        pid = self.page.stacks_pid
        if not pid or not self.is_descendant(pid):
            return ""
        os.lseek(self._file, 0, os.SEEK_SET)
        os.ftruncate(self._file, 0)
        os.kill(pid, STACKS_SIGNAL)
        deadline, size = time.monotonic() + _WRITING_S, 0
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, size = size, os.fstat(self._file).st_size
            if size and size == before:
                break
        return os.pread(self._file, size, 0).decode(errors="replace")


def _doing(seen: activity.Activity, state: str) -> str:
    return f"{_STATES[state]}, {describe(seen)}" if state in _STATES else describe(seen)


def _close_connection_to_hydra() -> None:
    """Close the connection of this rank to its launcher, if that is Hydra, while the launcher's child still runs.

    A rank that has called MPI_Finalize has no connection any more. If another rank closes it, Hydra kills all ranks,
    but not if it has noticed before that its child has ended (``pmi_cb`` in MPICH 5.0): the other ranks would wait
    forever. Hydra kills this process, too. Slurm's daemon, whose connection has the same variable, would end itself.
    """
    if "MPI_LOCALNRANKS" not in os.environ:
        return
    with contextlib.suppress(KeyError, ValueError, OSError):
        connection = socket.socket(fileno=int(os.environ["PMI_FD"]))
        connection.shutdown(socket.SHUT_WR)
        poll = select.poll()
        poll.register(connection, 0)  # reports only that Hydra has closed it
        poll.poll(_CLOSING_MS)


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
