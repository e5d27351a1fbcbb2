"""The reaper of a program: it copies the output, passes on requests to stop, and ends leftover processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from ..core.activity import ActivityPage
from ..core.words import counted, numbered
from ..monitor import heartbeat
from ..monitor.heartbeat import Heartbeat, RunEnd
from ..plan.program import ProgramRequest
from ..process import rank_status
from ..process.launcher_env import ATTEMPT
from ..process.pid import parent_of
from ..process.reaper import HANGS, PASSED_ON, Reaper, exit_like
from ..process.signals import STOPPED_EARLY
from .output import RankOutput, error_in
from .world import World, any_failed, leave, mark_ending, working_ranks

_SAVING_S = 600.0  # maximum time for the other ranks to save after this rank has saved
_ENDING_S = 0.5  # time between SIGTERM and SIGKILL to processes that a program leaves behind
_NOTICE_S = 5.0  # time after which a notice names a process that a program has left behind, and that can still print
_SILENT_S = 30.0  # time without output after which such a process is ended
_EXITING_S = 30.0  # maximum time from the end of the interpreter to that of its process
_MPI_LIBRARY = "/libmpi"
_WITHOUT_PROGRESS_S = 60.0  # time after which a notice reports that the program is not watched


@dataclass(frozen=True)
class ProgramRank:
    """A rank that executes a program.

    Attributes:
        rank: The number of the rank.
        world: All ranks.
        meeting: The folder through which the ranks have found each other.
        run_dir: The run directory.
        request: The program.
        known_pid: The process that the launcher has started.
    """

    rank: int
    world: World
    meeting: Path
    run_dir: Path
    request: ProgramRequest
    known_pid: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.world.entries)


class ProgramReaper(Reaper):
    """Watches the process of a program.

    Args:
        own: The rank.
        child: The process of the program.
        page: The page on which the program reports progress.
        stacks: The descriptor of a file to which a Python program writes its stacks.
        output: The output of the program.
    """

    def __init__(self, own: ProgramRank, child: int, page: ActivityPage, stacks: int, output: RankOutput) -> None:
        super().__init__(own.run_dir, own.rank, child, page, stacks)
        self._own, self._output, self._options = own, output, own.request.options
        self._stop_signal = signal.Signals[f"SIG{self._options.signal}"]
        self._is_stopping = self._is_ended = self._has_stop_signal = self._has_said = False
        self._launcher = os.getppid()
        self._exiting_since: float | None = None
        self._others_have_ended = False
        self._started_at, self._recorded_step = time.monotonic(), 0
        rank_status.register_program(own.run_dir, own.rank, child, own.known_pid)
        self._heartbeat = (
            Heartbeat(own.run_dir, counted(own.size, "rank"), 0, lambda: page.read().step) if own.rank == 0 else None
        )

    def look(self) -> None:
        if os.getppid() != self._launcher:
            self._end_without_launcher()
        if (step := self.page.read().step) != self._recorded_step:
            self._recorded_step = step
            rank_status.record_step(self._own.run_dir, self.rank, step)
        if (stop_at := self._own.world.stop_at) is not None and time.time() > stop_at:
            is_first = not self._is_stopping
            self._ask_to_stop()
            if is_first and self.rank == 0:
                _say("the time limit is near; the program has been asked to stop")
        self._end_exiting()
        self._report_without_progress()
        self._reap_orphans()

    def pass_on(self, number: int) -> None:
        """Pass a signal on; ``mpitrain run`` and batch scripts send SIGUSR1 to ask the program to stop."""
        if os.getppid() != self._launcher:
            self._end_without_launcher()  # the kernel has sent SIGTERM because the launcher was killed
        elif number == signal.SIGUSR1:
            self._ask_to_stop()
        else:
            # Under mpitrain run a request comes as SIGUSR1; SIGTERM usually comes from the launcher, which ends the
            # ranks.
            is_request = ATTEMPT not in os.environ
            self._is_stopping |= number in (signal.SIGTERM, signal.SIGINT) and is_request
            self._is_ended |= number == signal.SIGTERM and not is_request
            self._has_stop_signal |= number == self._stop_signal
            self.signal_rank(number)

    def end(self, killed_by: int, status: int) -> NoReturn:
        """Record how the program ended, and end in the same way.

        If the program has stopped on request, the status is 0 under ``mpitrain run``, else 75.
        """
        if killed_by or status or self._is_stopping:
            until = time.monotonic() + _NOTICE_S
            self._output.wait(is_over=lambda: time.monotonic() > until)
        else:
            self._wait_for_background()
        end_orphans()
        self._output.wait()
        # A launcher sends SIGTERM to the other ranks when one has failed.
        on_request = self._is_stopping and not any_failed(self._own.meeting)
        stopped = status == STOPPED_EARLY or (on_request and killed_by == self._stop_signal)
        done = stopped or not (killed_by or status)
        if self._is_ended and not done and status != HANGS:
            killed_by, status = signal.SIGTERM, 0  # the status is that of a handler, not the cause
        traceback = "" if done or status == HANGS else self._output.traceback
        rank_status.record_step(self._own.run_dir, self.rank, self.page.read().step)
        if traceback:
            rank_status.record_traceback(self._own.run_dir, self.rank, traceback)
        rank_status.record_end(
            self._own.run_dir,
            self.rank,
            self.child,
            0 if done else killed_by,
            0 if done else status,
            done=done,
            stopped=stopped,
            error=error_in(traceback),
            last_line=self._output.last_line if status not in (0, HANGS) and not (done or traceback) else "",
        )
        if self._heartbeat is not None:
            self._heartbeat.end(RunEnd("stopped" if stopped else "finished" if done else "failed"))
        # Launchers end ranks that still save when the first rank exits with another status than 0.
        status_of_stopped = 0 if ATTEMPT in os.environ else STOPPED_EARLY
        wait_s = _SAVING_S if stopped and status_of_stopped else 0.0
        leave(self._own.meeting, self.rank, self._own.size, not done, wait_s)
        if done:
            exit_like(0, status_of_stopped if stopped else 0)
        self._record_failure()
        exit_like(killed_by, status)

    def _wait_for_background(self) -> None:
        """Wait for processes that the program has left in the background, as mpirun does, while they print."""
        mark_ending(self._own.meeting, self.rank)
        until = time.monotonic() + _NOTICE_S
        self._output.wait(_NOTICE_S, lambda: time.monotonic() > until or not self._left_behind())
        if left := self._left_behind():
            what = f"process {left[0]}, which it has started, can still print"
            _say(f"rank {self.rank} has ended, but {what}; it is ended after {_SILENT_S:g} s without output")
            self._output.wait(_SILENT_S, lambda: not self._left_behind())

    def _left_behind(self) -> list[int]:
        """Return the processes that may still print; none if the run is to end."""
        self._reap_orphans()
        stop_at = self._own.world.stop_at
        is_late = stop_at is not None and time.time() > stop_at
        is_asked = not signal.sigpending().isdisjoint(PASSED_ON)
        if is_late or is_asked or any_failed(self._own.meeting) or os.getppid() != self._launcher:
            return []
        return [pid for pid in children() if pid != self.child] if self._output.is_open else []

    def _end_without_launcher(self) -> NoReturn:
        """End the program and the processes that it has started, because the launcher was killed."""
        os.kill(self.child, signal.SIGKILL)
        end_orphans()
        self._output.wait()
        if self._heartbeat is not None:
            self._heartbeat.end(RunEnd("failed"))
        os._exit(1)

    def _record_failure(self) -> None:
        """Record that the run has failed, and have ``mpitrain run`` end the other ranks."""
        recorded = heartbeat.read(self._own.run_dir)
        if recorded is not None and recorded.state != "failed":
            with contextlib.suppress(OSError):
                heartbeat.write(self._own.run_dir, replace(recorded, state="failed"))
        # If this rank was asked to stop, others may still be saving; if the launcher has ended it, it is not the cause.
        if not (self._is_stopping or self._is_ended):
            rank_status.record_failed(self._own.run_dir)

    def _ask_to_stop(self) -> None:
        """Send the program the signal to stop, only once, because a second signal may end it immediately."""
        self._is_stopping = True
        if not self._has_stop_signal:
            self._has_stop_signal = True
            self.signal_rank(self._stop_signal)

    def _end_exiting(self) -> None:
        """End the program, with its own status, if a library hangs in a destructor after the interpreter has ended.

        A rank that has succeeded may wait in MPI_Finalize for ranks that still work.
        """
        status, now = self.page.exit_status, time.monotonic()
        if status is None or self.page.stacks_pid != self.child:
            return
        if self._exiting_since is None:
            self._exiting_since = now
            mark_ending(self._own.meeting, self.rank)
        if now < self._exiting_since + _EXITING_S:
            return
        ended = f"rank {self.rank}: Python has ended with status {status}, but its process"
        if status == 0 and self._uses_mpi() and not self._others_have_ended:
            working = working_ranks(self._own.meeting, self._own.size)
            if working and self.rank == min({*range(self._own.size)}.difference(working), default=self.rank):
                self._print_once(f"mpitrain: {ended} waits for {numbered('rank', working)}, perhaps in MPI_Finalize")
            self._others_have_ended, self._exiting_since = not working, now
            return
        _say(f"{ended} not within {_EXITING_S:g} s")
        os.kill(self.child, signal.SIGKILL)
        self.end(0, status)

    def _uses_mpi(self) -> bool:
        with contextlib.suppress(OSError), open(f"/proc/{self.child}/maps", errors="replace") as maps:
            return _MPI_LIBRARY in maps.read()
        return False

    def _report_without_progress(self) -> None:
        """Print once that hangs are not detected, if the program reports no progress."""
        limit_s = self._options.hang_timeout
        if self.rank or self._has_said or limit_s == 0 or self.page.read().count:
            return
        if time.monotonic() > self._started_at + (limit_s or _WITHOUT_PROGRESS_S):
            self._has_said = True
            _say("hangs are not detected until the program calls mpitrain.progress()")

    def _reap_orphans(self) -> None:
        """Reap the ended processes of the program whose own parent has ended."""
        for pid in children():
            if pid != self.child:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone, or a disk is full
        print(f"mpitrain: {line}", file=sys.stderr, flush=True)


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of its descendants whose own parent ends."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def children() -> list[int]:
    """Return the process ids of this process's children."""
    threads = Path("/proc/self/task").iterdir()
    try:
        return [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
    except OSError:  # a kernel without these files, or a thread has ended
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and parent_of(int(name)) == os.getpid()]


def end_orphans() -> None:
    """End the processes that the program has left behind, such as processes of a data loader."""
    number, deadline = signal.SIGTERM, time.monotonic() + _ENDING_S
    signaled: set[int] = set()
    while pids := children():
        if time.monotonic() > deadline:
            number, deadline = signal.SIGKILL, time.monotonic() + _ENDING_S
            if signaled == {0}:
                return  # the process is in an uninterruptible system call
            signaled = {0}
        for pid in pids:
            if pid not in signaled:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
                signaled.add(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
