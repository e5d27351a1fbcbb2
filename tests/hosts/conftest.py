"""Three hosts for the tests of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import ROOT, Mpi, missing, run
from .network import Hosts as Network
from .network import make_hosts


class Hosts:
    """Hosts that train."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def train(
        self, ranks: list[int], job: Path, *flags: str | Path, timeout: float = 90, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """``start``, which must succeed."""
        done = self.start(ranks, job, *flags, timeout=timeout, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def start(
        self, ranks: list[int], job: Path, *flags: str | Path, timeout: float = 90, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """``mpitrain train JOB FLAGS`` with so many ranks on each host, started from the first."""
        words = [str(self.network.python), "-m", "mpitrain", "train", str(job), *map(str, flags)]
        environment = {**self.network.environment, **(env or {})}
        return run(self.network.launch(ranks, words), timeout=timeout, env=environment, cwd=ROOT)


@pytest.fixture(scope="session")
def hosts(openmpi: Mpi) -> Iterator[Hosts]:
    """Three hosts, gone again after the tests."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        missing("root and iproute2, to make hosts of network namespaces")
    with make_hosts(openmpi.python, 3) as network:
        yield Hosts(network)
