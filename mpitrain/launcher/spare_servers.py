"""Fork servers on spare hosts, on which ranks then start as quickly as on the hosts that have had ranks before."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.openblas import KERNELS
from ..monitor.run_record import recorded_kernels
from ..process import fork_server, rank_status
from ..process.launcher_env import MAX_RESTARTS
from ..process.rank_status import RUN_DIR_VARIABLE
from .hosts import RemoteAgent

_POLL_S, _END_S = 0.5, 5.0
_PASSED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


class SpareServers:
    """Starts a fork server on each spare host once the ranks train, because the kernels of BLAS are recorded then.

    The process that has started the server there waits for the end of its input, and then stops the server. A host on
    which this fails starts ranks in the ordinary way.

    Args:
        hosts: The spare hosts on which servers are started.
        variables: The variables that the user has set for ranks. Those that a start of Python does not need are not
            passed, because they would be seen in a command line.
    """

    def __init__(self, agent: RemoteAgent, hosts: Sequence[str], run_dir: Path, variables: Mapping[str, str]) -> None:
        self._agent, self._run_dir, self._variables = agent, run_dir, variables
        self._ending, self._processes = threading.Event(), list[subprocess.Popen[bytes]]()
        self._thread = threading.Thread(target=self._start, args=(hosts,), daemon=True)
        if hosts:
            self._thread.start()

    def _start(self, hosts: Sequence[str]) -> None:
        while not any(status.is_training for status in rank_status.read(self._run_dir)):
            if self._ending.wait(_POLL_S):
                return
        known = {**os.environ, **self._variables}
        ours = {KERNELS: recorded_kernels(self._run_dir), RUN_DIR_VARIABLE: str(self._run_dir), MAX_RESTARTS: "1"}
        variables = {name: known[name] for name in _PASSED if name in known} | ours | {fork_server.SPARE: "1"}
        settings = [f"{name}={value}" for name, value in variables.items()]
        words = shlex.join(["env", *settings, sys.executable, "-m", "mpitrain", "train"])
        command = f"cd {shlex.quote(os.getcwd())} && exec {words} {fork_server.INPUT}<&0"
        self._processes += filter(None, [self._agent.start(host, command) for host in hosts])

    def close(self) -> None:
        """Stop the servers."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        for process in self._processes:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                process.communicate(timeout=_END_S)  # closes its input
            process.kill()
            process.wait()
