"""The launcher's process: it is asked to stop, ended or killed."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from enum import Enum, auto

from ..process.reaper import end_with_parent
from ..process.stream_client import VARIABLE
from .output_filter import LauncherFilter
from .stream_server import Source, StreamServer
from .terminal import say

_GRACE_S = 3.0  # time between SIGTERM and SIGKILL
_POLL_S = 0.05
_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)  # the user's limits: soft, hard


class Phase(Enum):
    RUNNING = auto()
    STOPPING = auto()  # the ranks were asked to save and exit
    ENDING = auto()  # the launcher was sent SIGTERM or SIGKILL


class LauncherProcess(subprocess.Popen[bytes]):
    """A launcher, which leads its own session; its messages are filtered, and written with the output of the ranks.

    Attributes:
        phase, phase_began: What has been asked of it, and since when, by the monotonic clock.
        is_reported: Whether the reason for ending it has been printed.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], streams: StreamServer) -> None:
        source, pipe = subprocess.DEVNULL if VARIABLE in environment else streams.input.descriptor, subprocess.PIPE
        super().__init__(words, env=environment, stdin=source, stdout=pipe, stderr=pipe, preexec_fn=begin_session)
        # Each rank needs two descriptors here; ranks keep the user's limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES[1], _FILES[1]))
        self.phase, self.phase_began, self.is_reported = Phase.RUNNING, 0.0, False
        self._filters = LauncherFilter(), LauncherFilter()
        assert self.stdout is not None and self.stderr is not None
        streams.start()
        streams.output.add(os.dup(self.stdout.fileno()), Source("launcher", self._filters[0]))
        streams.errors.add(os.dup(self.stderr.fileno()), Source("launcher", self._filters[1]))

    @property
    def output(self) -> str:
        """Its latest messages, including those that were filtered out."""
        return b"".join(each.output for each in self._filters).decode(errors="replace")

    @property
    def filtered_output(self) -> str:
        """The messages that were not shown."""
        return b"".join(each.dropped for each in self._filters).decode(errors="replace")

    def still_runs(self) -> bool:
        """Wait a moment; return whether the launcher runs. Kill it if it does not end in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=_POLL_S)
        if self.phase is Phase.ENDING and time.monotonic() > self.phase_began + _GRACE_S:
            self.kill_group()
        return self.returncode is None

    def ask_to_stop(self) -> None:
        """Ask the ranks to save and exit; may be repeated.

        Launchers forward SIGUSR1 to the ranks and do nothing else. On SIGINT or SIGTERM they would kill the ranks
        before these can save.
        """
        if self.phase is not Phase.STOPPING:
            self._enter(Phase.STOPPING)
        self.send_signal(signal.SIGUSR1)

    def end(self, *why: str) -> None:
        """Print why, if this is not known, and terminate the launcher."""
        self._enter(Phase.ENDING, *why)
        self.send_signal(signal.SIGTERM)

    def kill_group(self, *why: str) -> None:
        """Kill the launcher and its processes on this host; the launcher's daemons end the ranks on other hosts."""
        self._enter(Phase.ENDING, *why)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _enter(self, phase: Phase, *why: str) -> None:
        for line in why:
            say(line)
        self.phase, self.phase_began, self.is_reported = phase, time.monotonic(), self.is_reported or bool(why)


def begin_session() -> None:
    """Set up the launcher's process (runs between fork and exec)."""
    # A session without a terminal: Ctrl-C reaches only the parent, which decides what to pass on, and an ssh that asks
    # for a password fails at once. A rank may read the terminal of another session, even in the background.
    os.setsid()
    resource.setrlimit(resource.RLIMIT_NOFILE, _FILES)
    end_with_parent(signal.SIGTERM)  # lets the launcher end its ranks
