"""``mpitrain run --hosts`` starts programs that do not use mpitrain: torch.distributed works between the hosts."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mpitrain.process import rank_status

from ..support.hosts.network import AGENT, Hosts as Network
from ..support.hosts.training import Hosts
from ..support.launch import LAUNCHER_ENVIRONMENT, PROGRAMS, ROOT, Mpi, run
from ..support.waiting import limit, wait_until

SUMMING = PROGRAMS / "summing.py"


@pytest.fixture(scope="module")
def network(hosts: Hosts) -> Iterator[Network]:
    """Hosts that can resolve each other's names, as gloo requires if no network is given."""
    names = "127.0.0.1 localhost\n" + "".join(f"{hosts.network.net}.{number} h{number}\n" for number in (1, 2, 3))
    folders = [Path(f"/etc/netns/{hosts.network.prefix}{number}") for number in (1, 2, 3)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(names)  # ip netns exec mounts it as /etc/hosts
    yield hosts.network
    for folder in folders:
        shutil.rmtree(folder)
    with suppress(OSError):
        folders[0].parent.rmdir()  # fails if the folder is not empty


def command(network: Network, mpi: Mpi, run_dir: Path, *words: str | Path) -> list[str]:
    """Return the command line of ``mpitrain run`` with two ranks on the first host and one on the second."""
    start = [*network.on_first(), str(mpi.python), "-m", "mpitrain", "run", "--remote-agent", str(AGENT)]
    return [*start, "--hosts", f"{network.net}.1:2,{network.net}.2:1", "--run-dir", str(run_dir), *map(str, words)]


def test_every_byte_passes_between_hosts(network: Network, mpi: Mpi, tmp_path: Path) -> None:
    first = [*network.on_first(), str(mpi.python), "-m", "mpitrain", "run", "--remote-agent", str(AGENT)]
    words = [*first, "--hosts", f"{network.net}.2:1,{network.net}.1:1", "--run-dir", str(tmp_path / "run")]
    program = "import sys, os; sys.stdout.buffer.write(sys.stdin.buffer.read()); sys.stderr.write('no end')"
    data = random.Random(0).randbytes(200_000)
    done = subprocess.run(
        [*words, "--", str(mpi.python), "-c", f"{program}; os.kill(os.getpid(), 9 * (os.environ['RANK'] == '0'))"],
        input=data,
        capture_output=True,
        env={**os.environ, **LAUNCHER_ENVIRONMENT, **network.environment},
        timeout=limit(60),
        check=False,
    )
    assert done.stdout == data  # of rank 0, which is on the other host
    assert b"no end" in done.stderr.splitlines()
    assert done.returncode == 1


@pytest.mark.parametrize("named", [False, True], ids=["", "--network"])
def test_torch_sums_between_hosts(network: Network, openmpi: Mpi, named: bool, tmp_path: Path) -> None:
    flags = ["--network", f"{network.net}.0/24"] if named else []
    words = command(network, openmpi, tmp_path / "run", *flags, SUMMING, tmp_path)
    done = run(words, env=network.environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((tmp_path / f"sum-{rank}.json").read_text()) for rank in range(3)]
    assert [record["sum"] for record in found] == [6.0, 6.0, 6.0]
    assert [record["LOCAL_RANK"] for record in found] == ["0", "1", "0"]
    assert [record["LOCAL_WORLD_SIZE"] for record in found] == ["2", "2", "1"]
    assert [record["GROUP_RANK"] for record in found] == ["0", "0", "1"]
    assert [record["host"] for record in found] == ["h1", "h1", "h2"]
    assert {record["GROUP_WORLD_SIZE"] for record in found} == {"2"}
    assert {record["MASTER_ADDR"] for record in found} == {f"{network.net}.1"}
    assert {record["interface"] for record in found} == {"eth0" if named else None}


def test_a_killed_rank_of_another_host_is_named(network: Network, openmpi: Mpi, tmp_path: Path) -> None:
    run_dir, before = tmp_path / "run", set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        command(network, openmpi, run_dir, SUMMING, tmp_path, "wait"),
        env={**os.environ, **network.environment},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("sum-*.json"))) == 3, "three sums", process=process)
        (pid,) = (status.pid for status in rank_status.read(run_dir) if status.rank == 2)
        os.kill(pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=limit(40))
    finally:
        process.kill()
    assert process.returncode == 1, errors
    messages = [line for line in errors.splitlines() if line.startswith("mpitrain:")]
    assert len(messages) == 1
    assert messages[0].startswith(f"mpitrain: rank 2 of 3 on h2, process {pid}, was killed by signal 9")
    wait_until(lambda: not any(map(network.pids, (1, 2, 3))), "all processes end", 10)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith(("torch", "sm_segment.h"))]
