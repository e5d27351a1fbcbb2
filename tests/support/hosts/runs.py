"""Runs on three hosts."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from mpitrain import checkpoint
from mpitrain.process import rank_status

from ..launch import JOBS, ROOT, Mpi
from .training import Hosts

# Open MPI has no information that the three hosts share the cores of this machine.
FLAGS = ["--env", "OMPI_MCA_mpi_yield_when_idle=1"]
JOB = [JOBS / "small.py", "--threads", "1", "--validate-steps", "0", "--log-steps", "0", "--save-secs", "0.3"]
FOREVER = "100000000"


class Run:
    """``mpitrain run`` with a rank on each of three hosts, started from the first host."""

    def __init__(self, hosts: Hosts, mpi: Mpi, folder: Path, *flags: str, steps: str = FOREVER) -> None:
        self.network, self.run_dir, self.gone = hosts.network, folder / "run", folder / "gone"
        words = self.network.run(mpi.python, [1, 1, 1], *FLAGS, *JOB, "--train-steps", steps, *flags)
        environment = {**os.environ, **self.network.environment, "MPITRAIN_TEST_GONE": str(self.gone)}
        self.process = subprocess.Popen(
            [*words, "--run-dir", str(self.run_dir)],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_checkpoint(self) -> None:
        deadline = time.monotonic() + 40
        while not checkpoint.steps(self.run_dir / "checkpoints"):
            self._check(deadline)

    def wait_for_ranks(self, other_than: int = 0) -> list[rank_status.RankStatus]:
        """Return the status of the three ranks once all workers train and rank 1 is not the process ``other_than``."""
        deadline = time.monotonic() + 40
        while True:
            entries = rank_status.read(self.run_dir)
            if (
                len(entries) == 3
                and entries[1].pid != other_than
                and all(entry.step or entry.role == "ps" for entry in entries)
            ):
                return entries
            self._check(deadline)

    def _check(self, deadline: float) -> None:
        """Wait a moment; fail if the run has ended, or after the deadline."""
        if time.monotonic() > deadline or self.process.poll() is not None:
            self.process.terminate()
            pytest.fail(f"{self.process.communicate(timeout=20)}")
        time.sleep(0.02)

    def end(self) -> tuple[int, str, list[str]]:
        """Wait for the end; return the status, standard output and lines of standard error.

        Fails if a process is left on a host.
        """
        try:
            out, err = self.process.communicate(timeout=120)  # 3,000 steps take 8 s, and on a busy machine a minute
        finally:
            self.process.kill()
        deadline = time.monotonic() + 10
        while left := [number for number in (1, 2, 3) if self.network.pids(number)]:
            assert time.monotonic() < deadline, [_commands(self.network.pids(number)) for number in left]
            time.sleep(0.05)
        return self.process.returncode, out, [line for line in err.splitlines() if line]


def _commands(pids: list[int]) -> list[str]:
    return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids]
