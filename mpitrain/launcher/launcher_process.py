"""The launcher's process: its output is forwarded, and it is asked to stop, ended or killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import IO

from ..process.reaper import end_with_parent
from .output_filter import LauncherFilter
from .terminal import forward, say

_GRACE_S = 3.0  # time between SIGTERM and SIGKILL
_POLL_S = 0.05
_KEPT_BYTES = 200_000  # size of the kept end of the output


class Phase(Enum):
    RUNNING = auto()
    STOPPING = auto()  # the ranks were asked to save and exit
    ENDING = auto()  # the launcher was sent SIGTERM or SIGKILL


class LauncherProcess(subprocess.Popen[bytes]):
    """A launcher, which leads its own process group; its output is forwarded.

    Attributes:
        phase, phase_began: What has been asked of it, and since when, by the monotonic clock.
        is_reported: Whether the reason for ending it has been printed.
        output: The latest output of ranks and launcher, including filtered output.
        filtered_output: The launcher output that was not shown.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_begin)
        self.phase, self.phase_began, self.is_reported = Phase.RUNNING, 0.0, False
        self.output, self.filtered_output = bytearray(), ""
        pairs = (self.stdout, sys.stdout.buffer), (self.stderr, sys.stderr.buffer)
        self._readers = [threading.Thread(target=self._forward, args=pair, daemon=True) for pair in pairs]
        for reader in self._readers:
            reader.start()

    def still_runs(self) -> bool:
        """Wait a moment; return whether the launcher runs. Kill it if it does not end in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=_POLL_S)
        if self.phase is Phase.ENDING and time.monotonic() > self.phase_began + _GRACE_S:
            self.kill_group()
        return self.returncode is None

    def finish_output(self) -> None:
        """Wait until the output is forwarded, but at most 1 s: a leftover process may keep the pipe open."""
        for reader in self._readers:
            reader.join(timeout=1)

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

    def _forward(self, pipe: IO[bytes], stream: IO[bytes]) -> None:
        """Forward the output to ``stream``, without the launcher's comments on how ranks ended."""
        launcher_filter = LauncherFilter()
        while chunk := _read(pipe):
            chunk = chunk.replace(b"\0", b"")  # Open MPI ends its comments with a null byte
            self.output += chunk
            del self.output[:-_KEPT_BYTES]
            forward(stream, launcher_filter.feed(chunk))
        forward(stream, launcher_filter.rest())
        self.filtered_output += launcher_filter.dropped.decode(errors="replace")


def _read(pipe: IO[bytes]) -> bytes:
    """Return the next chunk; empty at the end, or if a leftover process holds a pipe that is already closed here."""
    try:
        return os.read(pipe.fileno(), 65536)
    except (OSError, ValueError):
        return b""


def _begin() -> None:
    """Set up the launcher's process (runs between fork and exec)."""
    os.setpgid(0, 0)  # Ctrl-C in the terminal then reaches only the parent, which decides what to forward
    end_with_parent(signal.SIGTERM)  # lets the launcher end its ranks
