"""One run of the launcher process: forward output and signals, and kill leftover processes at the end."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import IO

from ..core.openblas import without_chosen
from ..core.words import numbered
from ..process import host_watcher, rank_status
from ..process.pid import is_alive, process_state
from ..process.reaper import end_with_parent
from .command_line import Command
from .host_monitor import HostMonitor
from .hosts import RemoteAgent, is_local
from .interrupts import Interrupts
from .output_filter import LauncherFilter
from .scaling import ScaleRequest, read_request
from .terminal import forward, say

_GRACE_S = 3.0  # time between SIGTERM and SIGKILL to the launcher
_POLL_S = 0.05  # interval of the supervision loop
_FLUSH_REMOTE_S = 0.3  # time for output of ranks on other hosts to arrive
_FLUSH_S = 0.05  # time for the launcher to forward the output that ranks have written
_LOOK_S = 5.0  # interval of the checks of the ranks' progress
_STOP_S = 4.0  # time without a busy rank until ranks that were asked to save and exit are ended
_OUTSTAYS_S = 30.0  # time for the launcher to exit after all ranks have ended
_EARLY_S = 60.0  # time for the other ranks to exit after the first one
_LISTED = 8  # maximum number of ranks named in a message
_KEPT_BYTES = 200_000  # size of the kept end of the output


@dataclass(frozen=True)
class AttemptResult:
    """How one run of the launcher process ended.

    Attributes:
        pid: The launcher's process id.
        status: The launcher's exit status; negative if a signal killed it.
        output: The latest output of ranks and launcher, including filtered output.
        filtered_output: The launcher output that was not shown.
        ended_at: When the launcher had ended, in seconds since the epoch.
        statuses: The status records of all ranks that registered.
        tracebacks: The tracebacks of ranks that ended with an unexpected exception, by rank.
        lost_hosts: Hosts that stopped answering.
        is_reported: Whether the reason for ending the launcher has been printed.
        unreachable: Hosts that could not be searched for leftover ranks, with the reason.
    """

    pid: int
    status: int
    output: str
    filtered_output: str
    ended_at: float
    statuses: Sequence[rank_status.RankStatus]
    tracebacks: Mapping[int, str]
    lost_hosts: Sequence[str]
    is_reported: bool
    unreachable: Mapping[str, str]


class _Phase(Enum):
    RUNNING = auto()
    STOPPING = auto()  # the ranks were asked to save and exit
    ENDING = auto()  # the launcher was sent SIGTERM or SIGKILL


class Attempt:
    """One run of the launcher process.

    Args:
        ranks: Number of ranks to start; None if the launcher determines it.
        hosts: The hosts that the user named.
        link_timeout_s: Seconds without an answer after which a host is lost.
        stopping: The action of ranks that are asked to stop, as text for a message.
        accepts: Answers a request to scale the run; returns whether the ranks must stop for the request.
    """

    def __init__(
        self,
        command: Command,
        ranks: int | None,
        hosts: Sequence[str],
        run_dir: Path,
        agent: RemoteAgent,
        interrupts: Interrupts,
        link_timeout_s: float,
        stopping: str,
        accepts: Callable[[ScaleRequest], bool],
    ) -> None:
        self._command, self._ranks, self._run_dir = command, ranks, run_dir
        self._remote_hosts = [host for host in hosts if not is_local(host)]
        self._agent, self._interrupts, self._link_timeout_s = agent, interrupts, link_timeout_s
        self._stopping, self._accepts = stopping, accepts
        self._output = bytearray()
        self._filtered_output = ""
        # In the phase ``STOPPING``, ``_phase_began`` advances while a rank is busy.
        self._phase, self._phase_began = _Phase.RUNNING, 0.0
        self._all_ended_at: float | None = None  # when all ranks were first seen to have ended
        self._stopped_reapers: set[int] = set()  # process ids
        self._lost_hosts: list[str] = []
        self._is_reported = self._suspend_requested = self._reported_early_exits = False

    def run(self) -> AttemptResult:
        """Run the launcher until it ends, then kill all leftover ranks. Call it once."""
        rank_status.clear(self._run_dir)
        began = time.time()
        process = self._launch(self._command.words, {**without_chosen(os.environ), **self._command.environment})
        ended_at = time.time()
        statuses = rank_status.read(self._run_dir)
        tracebacks = rank_status.read_tracebacks(self._run_dir)
        unreachable = self._kill_leftover_ranks(process, statuses, began)
        rank_status.clear(self._run_dir)
        return AttemptResult(
            process.pid,
            process.returncode,
            self._output.decode(errors="replace"),
            self._filtered_output,
            ended_at,
            statuses,
            tracebacks,
            self._lost_hosts,
            self._is_reported,
            unreachable,
        )

    def _launch(self, words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Run the launcher; return its process, which has ended."""
        with subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_begin
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            readers = [
                threading.Thread(target=self._forward, args=pair, daemon=True)
                for pair in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer))
            ]
            for reader in readers:
                reader.start()
            monitor = HostMonitor(self._agent, self._remote_hosts, self._run_dir, self._link_timeout_s)
            try:
                with self._suspendable():
                    self._supervise(process, monitor)
            finally:
                monitor.close()
            for reader in readers:
                reader.join(timeout=1)  # a leftover process may keep the pipe open
        return process

    def _supervise(self, process: subprocess.Popen[bytes], monitor: HostMonitor) -> None:
        """Handle signals, hangs and lost hosts until the launcher has ended."""
        looked = time.monotonic()
        while process.poll() is None:
            self._handle_signals(process)
            self._handle_suspension()
            self._handle_scaling(process)
            if self._phase is not _Phase.ENDING and rank_status.any_failed(self._run_dir):
                # The launcher would take half a second to end the other ranks.
                time.sleep(_FLUSH_REMOTE_S if self._remote_hosts else _FLUSH_S)
                self._kill(process)
            look_s = 1.0 if self._phase is _Phase.STOPPING else _LOOK_S
            if self._phase is not _Phase.ENDING and time.monotonic() > looked + look_s:
                looked = time.monotonic()
                self._check_progress(process, looked)
            self._check_hosts(process, monitor)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_POLL_S)

    def _enter(self, phase: _Phase) -> None:
        self._phase, self._phase_began = phase, time.monotonic()

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        """Ask the ranks to save and exit.

        Launchers forward SIGUSR1 to the ranks and do nothing else. On SIGINT or SIGTERM they would kill the ranks
        before these can save.
        """
        self._enter(_Phase.STOPPING)
        process.send_signal(signal.SIGUSR1)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Terminate the launcher."""
        self._enter(_Phase.ENDING)
        process.send_signal(signal.SIGTERM)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the launcher and its processes on this host; the launcher's daemons end the ranks on other hosts."""
        self._enter(_Phase.ENDING)
        _kill_group(process)

    def _check_hosts(self, process: subprocess.Popen[bytes], monitor: HostMonitor) -> None:
        """Report hosts that do not answer; end the launcher if one is lost."""
        for line in monitor.look():
            say(line)
        if self._phase is not _Phase.ENDING and (lost := monitor.lost()):
            self._lost_hosts, self._is_reported = lost, True
            for host in lost:
                say(f"host {host} has not answered for {self._link_timeout_s:g} s; ending the ranks")
            self._kill(process)  # the launcher would wait for its daemon on the lost host

    def _check_reapers(self, statuses: Sequence[rank_status.RankStatus]) -> None:
        """End local ranks that nothing watches: their reaper is stopped, and was stopped at the last check, too."""
        stopped = {s.reaper: s.rank for s in statuses if is_local(s.host) and process_state(s.reaper) == "T"}
        for reaper in stopped.keys() & self._stopped_reapers:
            say(f"process {reaper}, which watches rank {stopped[reaper]}, is stopped; ending the rank")
            with contextlib.suppress(ProcessLookupError):
                os.kill(reaper, signal.SIGKILL)  # the kernel then kills the rank
        self._stopped_reapers = set(stopped)

    def _check_progress(self, process: subprocess.Popen[bytes], now: float) -> None:
        """Act on ranks that do not exit as expected.

        Reports ranks that exited early, ends a launcher that continues after its ranks, and repeats the request to
        stop.
        """
        statuses = rank_status.read(self._run_dir)
        self._check_reapers(statuses)
        running = sum(not (status.done or status.ended_at) for status in statuses)
        ended = bool(statuses) and len(statuses) == self._ranks and not running
        self._all_ended_at = (self._all_ended_at or now) if ended else None
        self._report_early_exits(statuses)
        if self._all_ended_at is not None and now > self._all_ended_at + _OUTSTAYS_S:
            self._end(process)
        elif self._phase is _Phase.STOPPING and not ended:
            self._check_stop(process, running, now)

    def _handle_scaling(self, process: subprocess.Popen[bytes]) -> None:
        """Request that the ranks save and exit if the run is to continue on other ranks."""
        if self._phase is not _Phase.RUNNING:
            return
        request = read_request(self._run_dir)
        if request is not None and self._all_ranks_ready() and self._accepts(request):
            self._stop(process)

    def _report_early_exits(self, statuses: Sequence[rank_status.RankStatus]) -> None:
        """Report once if some ranks exited long ago, because the ranks that still run may wait for them forever."""
        ended = [status for status in statuses if status.ended_at]
        running = [status.rank for status in statuses if not status.ended_at]
        if ended and running and not self._reported_early_exits:
            first = min(ended, key=lambda status: status.ended_at)
            if time.time() > first.ended_at + _EARLY_S:
                self._reported_early_exits = True
                ranks = numbered("rank", running)
                say(
                    f"rank {first.rank} exited with status {first.status} {_EARLY_S:.0f} s ago, but {ranks} "
                    f"still {'run' if len(running) > 1 else 'runs'}; press Ctrl-C to end the run"
                )

    def _check_stop(self, process: subprocess.Popen[bytes], ranks: int, now: float) -> None:
        """Repeat the request to save and exit; after Ctrl-C, end the ranks if no rank can fulfil the request."""
        doing = rank_status.read_activities(self._run_dir)
        interrupted = self._interrupts.received[:1] == [signal.SIGINT]  # a scheduler sets its own limit
        if not interrupted or len(doing) < ranks or any(activity.busy for activity in doing.values()):
            self._phase_began = now
        elif now > self._phase_began + _STOP_S:
            say(f"ending the ranks, which cannot finish{_listed(doing)}")
            self._is_reported = True
            self._end(process)
            return
        process.send_signal(signal.SIGUSR1)

    def _handle_signals(self, process: subprocess.Popen[bytes]) -> None:
        """On the first signal, if the ranks are ready, request that they save and exit; otherwise end the launcher."""
        count = len(self._interrupts.received)  # the handler may append meanwhile
        if count == 1 and self._phase is _Phase.RUNNING and self._all_ranks_ready():
            self._stop(process)
            doing = _listed(rank_status.read_activities(self._run_dir))
            self._interrupts.end_echo()
            say(f"{self._stopping}; press Ctrl-C to exit immediately{doing}")
        elif (count and self._phase is _Phase.RUNNING) or (count > 1 and self._phase is _Phase.STOPPING):
            self._end(process)
        if self._phase is _Phase.ENDING and time.monotonic() > self._phase_began + _GRACE_S:
            _kill_group(process)

    @contextmanager
    def _suspendable(self) -> Iterator[None]:
        """Record Ctrl-Z inside the block."""
        before = signal.getsignal(signal.SIGTSTP)
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGTSTP, self._request_suspension)
        try:
            yield
        finally:
            signal.signal(signal.SIGTSTP, before)

    def _request_suspension(self, number: int, frame: object) -> None:
        self._suspend_requested = True

    def _handle_suspension(self) -> None:
        """Suspend the run after Ctrl-Z, until the user continues it."""
        if not self._suspend_requested:
            return
        self._suspend_requested = False
        if self._remote_hosts:  # while this process is suspended, the other hosts would treat its link as lost
            say("a run on several hosts cannot be suspended; press Ctrl-C to save and exit")
            return
        # The launcher is not suspended: if this process is killed, the launcher must still be able to end the ranks.
        host_watcher.signal_ranks(str(self._run_dir), signal.SIGSTOP)
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        host_watcher.signal_ranks(str(self._run_dir), signal.SIGCONT)

    def _all_ranks_ready(self) -> bool:
        """Return whether every rank is ready to save on a signal; before, there is nothing to save."""
        statuses = rank_status.read(self._run_dir)
        expected = len(statuses) if self._ranks is None else self._ranks
        return bool(statuses) and len(statuses) == expected and all(status.ready for status in statuses)

    def _kill_leftover_ranks(
        self, process: subprocess.Popen[bytes], statuses: Sequence[rank_status.RankStatus], began: float
    ) -> dict[str, str]:
        """Kill the ranks that still run, on all hosts, and remove their leftover files; normally nothing is left.

        Returns:
            The hosts on which killing was not possible, with the reason.
        """
        local = [status for status in statuses if is_local(status.host)]
        deadline = time.monotonic() + (1.0 if process.returncode else 5.0)
        while any(is_alive(status.pid, status.start) for status in local):
            if time.monotonic() > deadline:
                for status in local:
                    if is_alive(status.pid, status.start):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(status.pid, signal.SIGKILL)
                break
            time.sleep(0.02)
        # Open MPI's launcher exits with 0 when it has lost a host.
        ended_well = process.returncode in (0, os.EX_TEMPFAIL) and all(status.done for status in statuses)
        if self._phase is not _Phase.ENDING and (ended_well or process.returncode == 2):
            return {}
        _kill_group(process)  # for example an ssh whose remote process waits for the ended launcher
        host_watcher.end_ranks(str(self._run_dir))  # and the processes that they have started
        # A killed Open MPI launcher leaves a session directory that breaks a later launcher with the same process id.
        within_s = time.time() - began + 1.0
        files = host_watcher.remove_ended_sessions(str(self._run_dir), within_s)
        threading.Thread(target=host_watcher.remove_unused, args=(files,)).start()  # a restart need not wait
        words = [sys.executable, host_watcher.__file__, "end", str(self._run_dir), f"{within_s:.0f}"]
        return self._agent.run_on_each((host, shlex.join(words)) for host in self._remote_hosts)

    def _forward(self, pipe: IO[bytes], stream: IO[bytes]) -> None:
        """Forward the output to ``stream``, without the launcher's comments on how ranks ended."""
        launcher_filter = LauncherFilter()
        while chunk := _read(pipe):
            chunk = chunk.replace(b"\0", b"")  # Open MPI ends its comments with a null byte
            self._output += chunk
            del self._output[:-_KEPT_BYTES]
            forward(stream, launcher_filter.feed(chunk))
        forward(stream, launcher_filter.rest())
        self._filtered_output += launcher_filter.dropped.decode(errors="replace")


def _read(pipe: IO[bytes]) -> bytes:
    """Return the next chunk; empty at the end, or if a leftover process holds a pipe that is already closed here."""
    try:
        return os.read(pipe.fileno(), 65536)
    except (OSError, ValueError):
        return b""


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _begin() -> None:
    """Set up the launcher's process (runs between fork and exec)."""
    os.setpgid(0, 0)  # Ctrl-C in the terminal then reaches only the parent, which decides what to forward
    end_with_parent(signal.SIGTERM)  # lets the launcher end its ranks


def _listed(activities: Mapping[int, rank_status.LongActivity]) -> str:
    """Return the activities of ranks, as the end of a sentence."""
    return "".join(f"; rank {rank}: {activity.doing}" for rank, activity in list(activities.items())[:_LISTED])
