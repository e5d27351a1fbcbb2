"""Runs on three hosts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from mpitrain import checkpoint
from mpitrain.process import rank_status

from ..launch import JOBS, ROOT, Mpi
from ..waiting import T, limit, wait_until
from .training import Hosts

# Open MPI has no information that the three hosts share the cores of this machine.
FLAGS = ["--env", "OMPI_MCA_mpi_yield_when_idle=1"]
JOB = [JOBS / "small.py", "--threads", "1", "--validate-steps", "0", "--log-steps", "0", "--save-secs", "0.3"]
FOREVER = "100000000"


class Run:
    """``mpitrain run`` with a rank on each of three hosts, started from the first host."""

    def __init__(self, hosts: Hosts, mpi: Mpi, folder: Path, *flags: str, steps: str = FOREVER) -> None:
        self.network, self.run_dir, self.gone = hosts.network, folder / "run", folder / "gone"
        self._output, self._errors = folder / "output", folder / "errors"
        words = self.network.run(mpi.python, [1, 1, 1], *FLAGS, *JOB, "--train-steps", steps, *flags)
        environment = {**os.environ, **self.network.environment, "MPITRAIN_TEST_GONE": str(self.gone)}
        words += ["--run-dir", str(self.run_dir)]
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self.process = subprocess.Popen(words, env=environment, cwd=ROOT, stdout=output, stderr=errors)

    @property
    def errors(self) -> str:
        """The standard error of the run until now."""
        return self._errors.read_text()

    def wait_until(self, condition: Callable[[], T | None]) -> T:
        """Return the first true value of ``condition()``; fail if the run ends before."""
        return wait_until(condition, lambda: self._output.read_text() + self.errors, process=self.process)

    def wait_for_checkpoint(self) -> None:
        self.wait_until(lambda: checkpoint.steps(self.run_dir / "checkpoints"))

    def wait_for_ranks(self, other_than: int = 0, step: int = 1) -> list[rank_status.RankStatus]:
        """Return the status of the three ranks, once all workers have completed ``step``.

        Rank 1 must not be the process ``other_than``.
        """

        def ready() -> list[rank_status.RankStatus]:
            entries = rank_status.read(self.run_dir)
            reached = [entry.step >= step or entry.role == "ps" for entry in entries]
            return entries if len(entries) == 3 and entries[1].pid != other_than and all(reached) else []

        return self.wait_until(ready)

    def end(self) -> tuple[int, str, list[str]]:
        """Wait for the end; return the status, standard output and lines of standard error.

        Fails if a process is left on a host.
        """
        try:
            self.process.wait(timeout=limit(120))  # 3,000 steps take 8 s, and on a busy machine a minute
        finally:
            self.process.kill()
        wait_until(lambda: not any(map(self.network.pids, (1, 2, 3))), self._commands, 10)
        return self.process.returncode, self._output.read_text(), [line for line in self.errors.splitlines() if line]

    def _commands(self) -> list[str]:
        pids = [pid for number in (1, 2, 3) for pid in self.network.pids(number)]
        return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids]
