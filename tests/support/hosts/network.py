"""Several hosts on this machine: network namespaces with an address and a name each, on one bridge."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

AGENT = Path(__file__).parent / "agent.sh"


@dataclass(frozen=True)
class Hosts:
    """Hosts h1, h2, ... with addresses ``net``.1, ``net``.2, ...; ``launch`` uses ``mpirun`` next to ``python``.

    Each host has a separate folder for temporary files, ``folder``/h1, and so on. Files of a killed daemon therefore do
    not disturb a process of another test that has the same process id.
    """

    python: Path
    prefix: str
    net: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the remote agent."""
        return {"MPITRAIN_TEST_HOSTS": self.prefix, "MPITRAIN_TEST_TMP": str(self.folder)}

    def launch(self, ranks: list[int], words: list[str]) -> list[str]:
        """Return the command line that runs ``words`` with ``ranks[0]`` ranks on h1, ``ranks[1]`` ranks on h2, ..."""
        hosts = ",".join(f"{self.net}.{i}:{n}" for i, n in enumerate(ranks, 1))
        network = f"{self.net}.0/24"
        start = self.on_first()
        start += [str(self.python.parent / "mpirun"), "--host", hosts, "-n", str(sum(ranks)), "--bind-to", "none"]
        start += ["--prtemca", "plm_ssh_agent", str(AGENT), "--prtemca", "prte_if_include", network]
        start += ["--mca", "btl_tcp_if_include", network, "-x", "OMPI_MCA_mpi_yield_when_idle"]
        return [*start, *words]

    def on_first(self) -> list[str]:
        """Return the first words of a command line; the words that follow are run on the first host."""
        inside = ["unshare", "--uts", "env", f"TMPDIR={self.folder}/h1", "bash", "-c", 'hostname h1; exec "$@"', "-"]
        return ["ip", "netns", "exec", f"{self.prefix}1", *inside]

    def run(self, python: Path, ranks: list[int], *words: str | Path) -> list[str]:
        """Return the command line of ``mpitrain run WORDS`` with the given number of ranks per host."""
        hosts = ",".join(f"{self.net}.{i}:{n}" for i, n in enumerate(ranks, 1))
        start = [*self.on_first(), str(python), "-m", "mpitrain", "run", "--hosts", hosts]
        return [*start, "--remote-agent", str(AGENT), "--network", f"{self.net}.0/24", *map(str, words)]

    def sessions(self, number: int) -> list[str]:
        """Return the names of the session directories of Open MPI's launcher and daemons on a host."""
        return [path.name for path in (self.folder / f"h{number}").iterdir() if path.name.startswith(("ompi", "prte"))]

    def kill(self, number: int) -> None:
        """Kill every process of a host and remove the host's temporary files, as if the host had restarted."""
        for pid in self.pids(number):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        for path in (self.folder / f"h{number}").iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def set_link(self, number: int, state: str) -> None:
        """Set the network link of a host ``up`` or ``down``."""
        _ip("link", "set", f"{self.prefix}v{number}", state)

    def is_reachable(self, number: int) -> bool:
        """Return whether a host answers."""
        try:
            socket.create_connection((f"{self.net}.{number}", 1), timeout=1).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return True

    def pids(self, number: int) -> list[int]:
        """Return the ids of a host's processes."""
        return [int(pid) for pid in _ip("netns", "pids", f"{self.prefix}{number}").split()]


@contextmanager
def make_hosts(python: Path, count: int, rate: str = "") -> Iterator[Hosts]:
    """Yield hosts that are removed afterwards; needs root and iproute2.

    Args:
        python: Python of an environment with Open MPI.
        rate: Highest rate at which each host sends data, in the notation of ``tc`` (``1gbit``); empty for no limit.
    """
    prefix = f"mpit{os.getpid() % 10000}h"
    used = _ip("-o", "-4", "addr") + _ip("-4", "route", "show", "table", "all")
    # Test runs that start at the same time usually begin their search with different networks.
    nets = (f"10.214.{40 + (os.getpid() + i) % 210}" for i in range(210))
    net = next(net for net in nets if f"{net}." not in used)
    bridge = f"{prefix}b"
    folder = Path(tempfile.mkdtemp(prefix="hosts-"))
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{net}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number in range(1, count + 1):
            (folder / f"h{number}").mkdir()
            _add_host(prefix, number, net, bridge, rate)
        yield Hosts(python, prefix, net, folder)
    finally:
        for space in re.findall(rf"^{prefix}\d+", _ip("netns", "list"), re.MULTILINE):
            for pid in _ip("netns", "pids", space).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            _ip("netns", "del", space)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def _add_host(prefix: str, number: int, net: str, bridge: str, rate: str) -> None:
    space, veth = f"{prefix}{number}", f"{prefix}v{number}"
    _ip("netns", "add", space)
    _ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", space)
    _ip("link", "set", veth, "master", bridge, "up")
    _ip("-n", space, "addr", "add", f"{net}.{number}/24", "dev", "eth0")
    _ip("-n", space, "link", "set", "eth0", "up")
    _ip("-n", space, "link", "set", "lo", "up")
    if rate:
        limit = ["tbf", "rate", rate, "burst", "1mb", "latency", "50ms"]
        words = ["ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", "root", *limit]
        subprocess.run(words, check=True, capture_output=True)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
