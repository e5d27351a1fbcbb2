"""A real Slurm cluster on this machine: a controller, and nodes in namespaces with a name and an address each."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..waiting import T, limit, wait_until

HERE = Path(__file__).parent
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "ip", "unshare")
_PMIX = Path("/usr/lib/x86_64-linux-gnu/pmix2/lib")
_PROLOG = "#!/bin/sh\necho export TMPDIR={state}/tmp/$SLURMD_NODENAME\n"
_FOLDERS = ("etc", "run", "log", "state", "spool", "dev", "tmp")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")


@dataclass
class Cluster:
    """Nodes n1, n2, ... of a Slurm cluster, whose state is in one folder."""

    state: Path
    nodes: int
    net: str
    bridge: str
    inits: dict[int, int] = field(default_factory=dict)  # id on this machine of each node's first process

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of a user of this cluster."""
        return {"SLURM_CONF": str(self.state / "etc" / "slurm.conf")}

    def call(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands as a user would."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=limit(60), check=False)
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done

    def state_of(self, job: str) -> str:
        """Return a job's state; for an array or a heterogeneous job all states, separated by blanks."""
        output = self.call("squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%T").stdout
        return " ".join(sorted(set(output.split())))

    def wait(self, job: str, *states: str, timeout: float = 90) -> str:
        """Wait until a job (or array) is in one of these states (by default: has ended); return the state."""

        def reached() -> str:
            return now if set((now := self.state_of(job)).split()) <= set(states or ENDED) else ""

        return self._wait(reached, lambda: f"job {job} is still {self.state_of(job)}", timeout)

    def restart_now(self, job: str, timeout: float = 60) -> None:
        """Wait until a job has been requeued, and start it without Slurm's delay of two minutes."""
        self._wait(
            lambda: self.restarts(job) > 0 and self.state_of(job) != "COMPLETING",
            lambda: f"job {job} was not requeued: {self.state_of(job)}",
            timeout,
        )
        time.sleep(2)  # a node rejects credentials of the second in which the job has ended there
        self.call("scontrol", "update", f"jobid={job}", "starttime=now", check=False)  # it may have started by itself

    def _wait(self, condition: Callable[[], T | None], state: Callable[[], str], timeout: float) -> T:
        return wait_until(condition, lambda: f"{state()}\n{self.log_tail()}", timeout, poll_s=0.1)

    def restarts(self, job: str) -> int:
        """Return how often a job has been requeued."""
        return int(self.call("scontrol", "show", "job", job).stdout.split("Restarts=")[1].split()[0])

    def log_tail(self) -> str:
        """Return the end of the controller's log, for a failing test."""
        return (self.state / "log" / "slurmctld.log").read_text(errors="replace")[-3000:]

    def processes(self, node: int) -> list[str]:
        """Return the command lines of a node's processes, except its first process, Slurm's daemons and ``sleep``."""
        space = os.readlink(f"/proc/{self.inits[node]}/ns/pid")
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(folder / "ns" / "pid") == space and int(folder.name) != self.inits[node]:
                    found.append((folder / "cmdline").read_text().replace("\0", " "))
        return [line for line in found if line and not line.startswith(("slurmd ", "slurmstepd", "sleep "))]

    def start_node(self, number: int) -> None:
        """Start a node, as if it were powered on."""
        name = f"n{number}"
        (self.state / "tmp" / name).mkdir(parents=True, exist_ok=True)
        (self.state / "spool" / name).mkdir(exist_ok=True)
        spaces = ["--net", "--uts", "--ipc", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
        environment = {**os.environ, **self.environment, "NODE": name, "STATE": str(self.state)}
        environment["ADDRESS"] = f"{self.net}.{number}/24"
        with (self.state / "log" / f"{name}.log").open("ab") as log:
            words = ["setsid", "unshare", *spaces, "bash", str(HERE / "node.sh")]
            outer = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.inits[number] = _child_of(outer.pid)
        link = f"{self.bridge}v{number}"
        # Use the same address each time, because other hosts remember it for a while.
        peer = ["peer", "name", "eth0", "address", f"02:00:00:00:00:{number:02x}", "netns", str(self.inits[number])]
        _ip("link", "add", link, "type", "veth", *peer)
        _ip("link", "set", link, "master", self.bridge, "up")

    def crash_node(self, number: int) -> None:
        """Simulate a power failure: end every process of the node at once."""
        with suppress(ProcessLookupError):
            os.kill(self.inits[number], 9)
        subprocess.run(["ip", "link", "del", f"{self.bridge}v{number}"], check=False, capture_output=True)

    def wait_for_nodes(self, names: str) -> None:
        """Wait until nodes are up, with room for jobs."""
        words = ["sinfo", "-h", "-N", "-p", "debug", "-n", names, "-o", "%t"]

        def states() -> set[str]:
            return set(self.call(*words, check=False).stdout.split())

        self._wait(lambda: set() < states() <= {"idle", "mix"}, lambda: f"nodes are {states()}", 60)


@contextmanager
def make_cluster(nodes: int = 3, cpus: int = 4, gpus: int = 2) -> Iterator[Cluster]:
    """Yield a cluster, and remove it; needs root, and Debian's slurmctld, slurmd, slurm-client, munge."""
    used = _ip("-o", "-4", "addr") + _ip("-4", "route", "show", "table", "all")
    net = next(net for net in (f"10.215.{c}" for c in range(40, 250)) if f"{net}." not in used)
    # munged refuses a socket that other users cannot reach, and each start of pytest closes pytest's folder to them.
    state = Path(tempfile.mkdtemp(prefix="mpitrain-slurm-"))
    state.chmod(0o755)
    cluster = Cluster(state, nodes, net, f"mpis{os.getpid() % 10000}")
    for name in _FOLDERS:
        (state / name).mkdir()
    try:
        _configure(cluster, cpus, gpus)
        _munge(state)
        _ip("link", "add", cluster.bridge, "type", "bridge")
        _ip("addr", "add", f"{net}.254/24", "dev", cluster.bridge)
        _ip("link", "set", cluster.bridge, "up")
        cluster.call("slurmctld", "-i")
        for number in range(1, nodes + 1):
            cluster.start_node(number)
        cluster.wait_for_nodes(f"n[1-{nodes}]")
        yield cluster
    finally:
        for number in cluster.inits:
            cluster.crash_node(number)
        for daemon in ("slurmctld", "munged"):
            _stop(state / "run" / f"{daemon}.pid")
        subprocess.run(["ip", "link", "del", cluster.bridge], check=False, capture_output=True)
        shutil.rmtree(state, ignore_errors=True)


def _configure(cluster: Cluster, cpus: int, gpus: int) -> None:
    state, numbers = cluster.state, range(1, cluster.nodes + 1)
    host = socket.gethostname().split(".")[0]
    names = ["127.0.0.1 localhost", f"{cluster.net}.254 {host}", *(f"{cluster.net}.{n} n{n}" for n in numbers)]
    (state / "etc" / "hosts").write_text("\n".join(names) + "\n")
    for gpu in range(gpus):
        # Each fake GPU must have a separate device file.
        os.mknod(state / "dev" / f"nvidia{gpu}", 0o020666, os.makedev(1, 3))
    lines = [
        f"NodeName=n{n} NodeAddr={cluster.net}.{n} CPUs={cpus} RealMemory=4000 Gres=gpu:fake:{gpus} Feature=f{n}"
        for n in numbers
    ]
    values = {"host": host, "net": cluster.net, "state": state, "nodes": "\n".join(lines), "port": _free_port()}
    values |= {"slurmd_port": 16818, "seconds": round(limit(10))}
    (state / "etc" / "slurm.conf").write_text((HERE / "slurm.conf.in").read_text().format(**values))
    device = state / "dev" / f"nvidia[0-{gpus - 1}]"
    (state / "etc" / "gres.conf").write_text(f"NodeName=n[1-{cluster.nodes}] Name=gpu Type=fake File={device}\n")
    prolog = state / "etc" / "prolog"
    prolog.write_text(_PROLOG.format(state=state))
    prolog.chmod(0o755)
    if _PMIX.is_dir():
        shutil.copytree(_PMIX, state / "pmix", symlinks=True)
        if not (state / "pmix" / "libpmix.so").exists():
            (state / "pmix" / "libpmix.so").symlink_to("libpmix.so.2")


def _munge(state: Path) -> None:
    key = state / "etc" / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    run = state / "run"
    words = [f"--socket={run}/munge.socket", f"--key-file={key}", f"--pid-file={run}/munged.pid"]
    words += [f"--log-file={state}/log/munged.log", f"--seed-file={run}/munged.seed"]
    done = subprocess.run(["munged", *words], capture_output=True, text=True, timeout=limit(60), check=False)
    assert done.returncode == 0, done.stderr


def _stop(pid_file: Path) -> None:
    """End a daemon that this module started, and wait until it is gone."""
    with suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        os.kill(pid, 15)
        try:
            wait_until(lambda: "State:\tZ" in Path(f"/proc/{pid}/status").read_text(), "the daemon's end", 10)
        except AssertionError:
            os.kill(pid, 9)


def _child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return int(wait_until(lambda: children.read_text().split(), "a child process", 10)[0])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
