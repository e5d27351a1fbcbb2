"""Training on the test hosts."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ..launch import ROOT, run
from .network import Hosts as Network


class Hosts:
    """Hosts that train."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def train(
        self, ranks: list[int], job: Path, *flags: str | Path, timeout: float = 90, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Call ``start``; the command must succeed."""
        done = self.start(ranks, job, *flags, timeout=timeout, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def start(
        self, ranks: list[int], job: Path, *flags: str | Path, timeout: float = 90, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``mpitrain train JOB FLAGS`` from the first host, with the given numbers of ranks on the hosts."""
        words = [str(self.network.python), "-m", "mpitrain", "train", str(job), *map(str, flags)]
        environment = {**self.network.environment, **(env or {})}
        return run(self.network.launch(ranks, words), timeout=timeout, env=environment, cwd=ROOT)
