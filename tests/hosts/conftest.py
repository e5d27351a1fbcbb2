"""Several hosts on this machine: network namespaces with an address and a name each, on one bridge."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..conftest import ROOT, Mpi, missing, run

AGENT = Path(__file__).parent / "agent.sh"


@dataclass(frozen=True)
class Hosts:
    """Hosts h1, h2, ... with addresses ``net``.1, ``net``.2, ..."""

    mpi: Mpi
    prefix: str
    net: str

    def train(
        self, ranks: list[int], job: Path, *flags: str | Path, timeout: float = 90
    ) -> subprocess.CompletedProcess[str]:
        """``start``, which must succeed."""
        done = self.start(ranks, job, *flags, timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def start(
        self, ranks: list[int], job: Path, *flags: str | Path, timeout: float = 90
    ) -> subprocess.CompletedProcess[str]:
        """``mpitrain train JOB FLAGS`` with so many ranks on each host, started from the first."""
        hosts = ",".join(f"{self.net}.{i}:{n}" for i, n in enumerate(ranks, 1))
        network = f"{self.net}.0/24"
        words = ["ip", "netns", "exec", f"{self.prefix}1", "unshare", "--uts"]
        words += ["bash", "-c", 'hostname h1; exec "$@"', "-"]
        words += [str(self.mpi.python.parent / "mpirun"), "--host", hosts, "-n", str(sum(ranks)), "--bind-to", "none"]
        words += ["--prtemca", "plm_ssh_agent", str(AGENT), "--prtemca", "prte_if_include", network]
        words += ["--mca", "btl_tcp_if_include", network, "-x", "OMPI_MCA_mpi_yield_when_idle"]
        words += [str(self.mpi.python), "-m", "mpitrain", "train", str(job), *map(str, flags)]
        return run(words, timeout=timeout, env={"MPITRAIN_TEST_HOSTS": self.prefix}, cwd=ROOT)


@pytest.fixture(scope="session")
def hosts(openmpi: Mpi) -> Iterator[Hosts]:
    """Three hosts, gone again after the tests."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        missing("root and iproute2, to make hosts of network namespaces")
    prefix = f"mpit{os.getpid() % 10000}h"
    used = _ip("-o", "-4", "addr") + _ip("-4", "route", "show", "table", "all")
    net = next(net for net in (f"10.214.{c}" for c in range(40, 250)) if f"{net}." not in used)
    bridge = f"{prefix}b"
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{net}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for i in (1, 2, 3):
            space, veth = f"{prefix}{i}", f"{prefix}v{i}"
            _ip("netns", "add", space)
            _ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", veth, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{net}.{i}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
        yield Hosts(openmpi, prefix, net)
    finally:
        for space in re.findall(rf"^{prefix}\d+", _ip("netns", "list"), re.MULTILINE):
            for pid in _ip("netns", "pids", space).split():
                os.kill(int(pid), 9)
            _ip("netns", "del", space)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
