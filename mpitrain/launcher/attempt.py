"""One run of the launcher process: act on what happens to it and its ranks, and kill leftover processes at the end."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.openblas import without_chosen
from ..process import host_watcher, rank_status
from ..process.pid import is_alive
from ..process.run_directory import is_stop_requested
from .command_line import Command
from .host_monitor import HostMonitor
from .hosts import RemoteAgent, is_local
from .interrupts import Interrupts, Suspension
from .launcher_process import LauncherProcess, Phase
from .rank_checks import RankChecks, listed
from .scaling import ScaleRequest, read_request
from .stream_server import StreamServer
from .terminal import say


@dataclass(frozen=True)
class AttemptResult:
    """How one run of the launcher process ended.

    Attributes:
        pid: The launcher's process id.
        status: The launcher's exit status; negative if a signal killed it.
        output: The latest output of the launcher, including filtered output.
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


@dataclass(frozen=True)
class Attempt:
    """One run of the launcher process.

    Attributes:
        ranks: Number of ranks to start; None if the launcher determines it.
        remote_hosts: The hosts that the user named, without this one.
        link_timeout_s: Seconds without an answer after which a host is lost.
        stopping: The action of ranks that are asked to stop, as text for a message.
        accepts: Answers a request to scale the run; returns whether the ranks must stop for the request.
        streams: Gives the ranks their standard streams; closed at the end.
    """

    command: Command
    ranks: int | None
    remote_hosts: Sequence[str]
    run_dir: Path
    agent: RemoteAgent
    interrupts: Interrupts
    link_timeout_s: float
    stopping: str
    accepts: Callable[[ScaleRequest], bool]
    streams: StreamServer

    def run(self) -> AttemptResult:
        """Run the launcher until it ends, then kill all leftover ranks."""
        rank_status.clear(self.run_dir)
        began = time.time()
        environment = without_chosen(os.environ) | self.command.environment
        try:
            with LauncherProcess(self.command.words, environment, self.streams) as launcher:
                lost_hosts = self._supervise(launcher)
            ended_at = time.time()
            statuses = rank_status.read(self.run_dir)
            tracebacks = rank_status.read_tracebacks(self.run_dir)
            unreachable = self._kill_leftover_ranks(launcher, statuses, began)
        finally:
            self.streams.close(lambda: len(self.interrupts.received) > 1)
        rank_status.clear(self.run_dir)
        return AttemptResult(
            pid=launcher.pid,
            status=launcher.returncode,
            output=launcher.output,
            filtered_output=launcher.filtered_output,
            ended_at=ended_at,
            statuses=statuses,
            tracebacks=tracebacks,
            lost_hosts=lost_hosts,
            is_reported=launcher.is_reported,
            unreachable=unreachable,
        )

    def _supervise(self, launcher: LauncherProcess) -> list[str]:
        """Handle signals, requests, hangs and lost hosts until the launcher has ended; return the lost hosts."""
        lost_hosts: list[str] = []
        suspension = Suspension(self.run_dir, is_possible=not self.remote_hosts)
        checks = RankChecks(launcher, self.ranks, self.run_dir, self.interrupts)
        monitor = HostMonitor(self.agent, self.remote_hosts, self.run_dir, self.link_timeout_s)
        with contextlib.closing(monitor), suspension.recorded():
            while launcher.still_runs():
                self._handle_signals(launcher)
                suspension.poll()
                self.streams.input.poll()
                self._handle_scaling(launcher)
                self._handle_failure(launcher)
                checks.poll()
                lost_hosts = lost_hosts or self._handle_lost_hosts(launcher, monitor)
        return lost_hosts

    def _handle_signals(self, launcher: LauncherProcess) -> None:
        """On the first signal, if the ranks are ready, request that they save and exit; otherwise end the launcher."""
        if is_stop_requested(self.run_dir):
            self.interrupts.request_stop()
        count = len(self.interrupts.received)  # the handler may append meanwhile
        if count == 1 and launcher.phase is Phase.RUNNING and self._all_ranks_ready():
            launcher.ask_to_stop()
            doing = listed(rank_status.read_activities(self.run_dir))
            self.interrupts.end_echo()
            say(f"{self.stopping}; press Ctrl-C to exit immediately{doing}")
        elif (count and launcher.phase is Phase.RUNNING) or (count > 1 and launcher.phase is Phase.STOPPING):
            launcher.end()

    def _handle_scaling(self, launcher: LauncherProcess) -> None:
        """Request that the ranks save and exit if the run is to continue on other ranks."""
        request = read_request(self.run_dir) if launcher.phase is Phase.RUNNING else None
        if request is not None and self._all_ranks_ready() and self.accepts(request):
            launcher.ask_to_stop()

    def _handle_failure(self, launcher: LauncherProcess) -> None:
        """Kill the launcher after a rank was killed: it would take half a second to end the other ranks."""
        if launcher.phase is not Phase.ENDING and rank_status.any_failed(self.run_dir):
            launcher.kill_group()

    def _handle_lost_hosts(self, launcher: LauncherProcess, monitor: HostMonitor) -> list[str]:
        """Report hosts that do not answer; if some are lost, kill the launcher and return them."""
        for line in monitor.look():
            say(line)
        lost = monitor.lost() if launcher.phase is not Phase.ENDING else []
        if lost:  # the launcher would wait for its daemon on the lost host
            why = f"has not answered for {self.link_timeout_s:g} s; ending the ranks"
            launcher.kill_group(*(f"host {host} {why}" for host in lost))
        return lost

    def _all_ranks_ready(self) -> bool:
        """Return whether every rank is ready to save on a signal; before, there is nothing to save."""
        statuses = rank_status.read(self.run_dir)
        expected = len(statuses) if self.ranks is None else self.ranks
        return bool(statuses) and len(statuses) == expected and all(status.ready for status in statuses)

    def _kill_leftover_ranks(
        self, launcher: LauncherProcess, statuses: Sequence[rank_status.RankStatus], began: float
    ) -> dict[str, str]:
        """Kill the ranks that still run, on all hosts, and remove their leftover files; normally nothing is left.

        Returns:
            The hosts on which killing was not possible, with the reason.
        """
        status = launcher.returncode
        _await_local_ranks(statuses, 1.0 if status else 5.0)
        # Open MPI's launcher exits with 0 when it has lost a host.
        ended_well = status in (0, os.EX_TEMPFAIL) and all(status.done for status in statuses)
        if launcher.phase is not Phase.ENDING and (ended_well or status == 2):
            return {}
        if any(status.is_program for status in statuses):
            self.streams.await_reapers()
        launcher.kill_group()  # for example an ssh whose remote process waits for the ended launcher
        host_watcher.end_ranks(str(self.run_dir))  # and the processes that they have started
        # A killed Open MPI launcher leaves a session directory that breaks a later launcher with the same process id.
        within_s = time.time() - began + 1.0
        files = host_watcher.remove_ended_sessions(str(self.run_dir), within_s)
        threading.Thread(target=host_watcher.remove_unused, args=(files,)).start()  # a restart need not wait
        words = [sys.executable, host_watcher.__file__, "end", str(self.run_dir), f"{within_s:.0f}"]
        return self.agent.run_on_each((host, shlex.join(words)) for host in self.remote_hosts)


def _await_local_ranks(statuses: Sequence[rank_status.RankStatus], timeout_s: float) -> None:
    """Wait until the ranks on this host have ended; kill those that run after the timeout."""
    running = [status for status in statuses if is_local(status.host)]
    deadline = time.monotonic() + timeout_s
    while running := [status for status in running if is_alive(status.pid, status.start)]:
        if time.monotonic() > deadline:
            for status in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(status.pid, signal.SIGKILL)
            return
        time.sleep(0.02)
