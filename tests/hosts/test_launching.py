"""``mpitrain run --hosts`` on three hosts: failed ranks are named, lost hosts are excluded, no process is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from unittest.mock import patch

import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint.memory import newest_state
from mpitrain.launcher import bad_hosts
from mpitrain.monitor.goodput import accounts_in
from mpitrain.monitor.metrics import read_lines
from mpitrain.process import fork_server, rank_status
from mpitrain.process.pid import parent_of
from mpitrain.process.signals import STOPPED_EARLY

from ..support.hosts.runs import FOREVER, Run
from ..support.hosts.training import Hosts
from ..support.launch import Mpi
from ..support.results import SMALL, assert_same_bits, final
from ..support.waiting import limit
from ..support.world.controller import World


class StartRun(Protocol):
    def __call__(self, mpi: Mpi, *flags: str, steps: str = FOREVER) -> Run: ...


@pytest.fixture
def runs(hosts: Hosts, tmp_path: Path) -> Iterator[StartRun]:
    """Starts runs, and ends them after the test."""
    started: list[Run] = []

    def start(mpi: Mpi, *flags: str, steps: str = FOREVER) -> Run:
        started.append(Run(hosts, mpi, tmp_path, *flags, steps=steps))
        return started[-1]

    yield start
    for run in started:
        run.process.kill()
        run.process.wait(timeout=limit(20))
    for number in (1, 2, 3):
        hosts.network.kill(number)


def test_a_run_continues_without_a_lost_host(runs: StartRun, mpi: Mpi) -> None:
    run = runs(mpi, "--max-restarts", "2", "--min-ranks", "2", steps="3000")
    run.wait_for_checkpoint()
    run.gone.write_text("2\n")
    run.network.kill(2)
    status, out, err = run.end()
    assert status == 0, out + "\n".join(err)
    assert any("ssh: connect to host h2" in line for line in err)
    again = next(line for line in err if "restarting from" in line)
    assert "restart 1 of 2" in again and "2 ranks" in again and f"{run.network.net}.2" not in again
    table = [line.split() for line in (run.run_dir / "ranks.txt").read_text().splitlines()[1:]]
    assert [row[1] for row in table] == ["h1", "h3"]
    assert max(checkpoint.steps(run.run_dir / "checkpoints")) == 3000


def test_a_run_without_a_lost_host_ends_with_the_bits_of_an_undisturbed_one(
    runs: StartRun, openmpi: Mpi, world: World, tmp_path: Path
) -> None:
    """The run has as many virtual workers as it had ranks at first."""
    run = runs(openmpi, "--max-restarts", "2", "--min-ranks", "2", "--no-joint", steps="3000")
    run.wait_for_ranks(step=300)
    run.gone.write_text("2\n")
    run.network.kill(2)
    status, out, err = run.end()
    assert status == 0, out + "\n".join(err)
    assert len((run.run_dir / "ranks.txt").read_text().splitlines()) == 3
    flags = ("--virtual-workers", "3", "--no-joint", "--validate-steps", "0", "--train-steps", "3000")
    world.train(1, SMALL, *flags, "--run-dir", tmp_path / "alone", timeout=120)
    assert_same_bits(final(run.run_dir), final(tmp_path / "alone"))


def test_a_spare_host_replaces_a_lost_one(runs: StartRun, mpi: Mpi, world: World, tmp_path: Path) -> None:
    flags = ("--max-restarts", "2", "--spare-hosts", "1", "--no-joint")
    run = runs(mpi, *flags, steps="3000")
    run.wait_until(lambda: [entry for entry in rank_status.read(run.run_dir) if entry.step > 300])
    assert sorted(entry.host for entry in rank_status.read(run.run_dir)) == ["h1", "h2"]
    server = run.wait_until(lambda: _fork_server(run, 3))
    run.gone.write_text("2\n")
    run.network.kill(2)
    reapers = run.wait_until(lambda: [rank.reaper for rank in rank_status.read(run.run_dir) if rank.host == "h3"])
    assert parent_of(reapers[0]) == server
    status, out, err = run.end()
    assert status == 0, out + "\n".join(err)
    table = [line.split() for line in (run.run_dir / "ranks.txt").read_text().splitlines()[1:]]
    assert [row[1] for row in table] == ["h1", "h3"]
    assert list(bad_hosts.read(run.run_dir)) == [f"{run.network.net}.2"]
    account = accounts_in(read_lines(run.run_dir / "metrics.jsonl"))[-1]
    assert 0 < account.seconds["spares"] <= (account.at - account.since) / 3
    assert sum(account.shares.values()) == pytest.approx(1, abs=0.05)
    world.train(2, SMALL, "--no-joint", "--validate-steps", "0", "--train-steps", "3000", "--run-dir", tmp_path / "two")
    assert_same_bits(final(run.run_dir), final(tmp_path / "two"))


def _fork_server(run: Run, number: int) -> int | None:
    """Return the process id of the fork server on a host."""
    with contextlib.suppress(OSError):  # a process has ended meanwhile
        for pid in run.network.pids(number):
            if Path(f"/proc/{pid}/comm").read_bytes().strip() == fork_server.NAME:
                return pid
    return None


def test_a_spare_host_with_a_full_disk_is_not_used(runs: StartRun, hosts: Hosts, openmpi: Mpi) -> None:
    folder, flags = hosts.network.folder / "h3", ("--max-restarts", "2", "--min-ranks", "1", "--spare-hosts", "1")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    try:
        run = runs(openmpi, *flags, "--no-joint", steps="2000")
        run.wait_until(lambda: [entry for entry in rank_status.read(run.run_dir) if entry.step > 300])
        run.gone.write_text("2\n")
        run.network.kill(2)
        status, out, err = run.end()
    finally:
        subprocess.run(["umount", folder], check=True)
    assert status == 0, out + "\n".join(err)
    assert len((run.run_dir / "ranks.txt").read_text().splitlines()) == 2
    reasons = bad_hosts.read(run.run_dir)
    assert sorted(reasons) == [f"{run.network.net}.2", f"{run.network.net}.3"]
    assert str(folder) in reasons[f"{run.network.net}.3"]


def test_a_spare_host_that_does_not_answer_is_not_used(runs: StartRun, openmpi: Mpi) -> None:
    run = runs(openmpi, "--max-restarts", "2", "--min-ranks", "1", "--spare-hosts", "1", "--no-joint", steps="2000")
    run.wait_until(lambda: [entry for entry in rank_status.read(run.run_dir) if entry.step > 300])
    run.gone.write_text("2\n3\n")
    run.network.kill(2)
    status, out, err = run.end()
    assert status == 0, out + "\n".join(err)
    assert len((run.run_dir / "ranks.txt").read_text().splitlines()) == 2
    assert sorted(bad_hosts.read(run.run_dir)) == [f"{run.network.net}.2", f"{run.network.net}.3"]


def test_a_host_whose_ranks_were_killed_twice_is_replaced(runs: StartRun, openmpi: Mpi) -> None:
    run = runs(openmpi, "--max-restarts", "3", "--spare-hosts", "1", "--no-joint", steps="4000")
    pids = {0}
    for number, step in ((signal.SIGKILL, 300), (signal.SIGSEGV, 1000)):
        assert not (run.run_dir / bad_hosts.FILE).exists()
        rank = run.wait_until(lambda step=step: _rank_on_second(run, pids, step))
        pids.add(rank.pid)
        os.kill(rank.pid, number)
    status, out, err = run.end()
    assert status == 0, out + "\n".join(err)
    table = [line.split() for line in (run.run_dir / "ranks.txt").read_text().splitlines()[1:]]
    assert [row[1] for row in table] == ["h1", "h3"]
    assert list(bad_hosts.read(run.run_dir)) == [f"{run.network.net}.2"]


def _rank_on_second(run: Run, other_than: set[int], step: int) -> rank_status.RankStatus | None:
    """Return the rank on the second host if it is a new process and has completed a step."""
    ranks = rank_status.read(run.run_dir)
    found = [rank for rank in ranks if rank.host == "h2" and rank.step > step and rank.pid not in other_than]
    return found[0] if found else None


def test_a_run_without_a_lost_host_continues_from_memory(runs: StartRun, openmpi: Mpi) -> None:
    run = runs(openmpi, "--max-restarts", "2", "--min-ranks", "2", "--save-secs", "0", steps="4000")
    step = run.wait_for_ranks(step=300)[0].step  # the first states in memory are copied in slow steps
    run.gone.write_text("3\n")
    run.network.kill(3)
    assert _resumed_at(run) > step / 4
    assert list(checkpoint.steps(run.run_dir / "checkpoints")) == [4000]


def test_a_server_gets_its_state_from_the_memory_of_the_chiefs_host(runs: StartRun, openmpi: Mpi) -> None:
    flags = ("--mode", "async", "--ps", "1", "--no-normalize", "--max-restarts", "2", "--save-secs", "0")
    run = runs(openmpi, *flags, steps="4000")
    with patch("socket.gethostname", return_value="h2"):  # the chief's host, whose name the state's folder depends on
        run.wait_until(lambda: newest_state(str(run.run_dir)))
    os.kill(run.wait_for_ranks()[2].pid, signal.SIGKILL)
    assert _resumed_at(run) > 0


def _resumed_at(run: Run) -> int:
    """Wait for the end of the run; return the step at which its only restart has continued."""
    status, out, err = run.end()
    assert status == 0, out + "\n".join(err)
    lines = map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines())
    (resumed_at,) = [line["resumed"] for line in lines if "resumed" in line]
    assert not any(".h5" in line for line in err)
    return int(resumed_at)


def test_a_rank_that_died_is_named_last(runs: StartRun, mpi: Mpi) -> None:
    run = runs(mpi, "--max-restarts", "1")
    first = run.wait_for_ranks()[1].pid
    os.kill(first, signal.SIGSEGV)
    run.wait_for_ranks(first)
    failed = int(re.findall(r"in step ([\d,]+)", run.errors)[0].replace(",", ""))
    second = run.wait_for_ranks(first, step=failed + 5)[1].pid  # so that the second kill is in a later step
    os.kill(second, signal.SIGKILL)
    status, out, err = run.end()
    assert status == 1, out + "\n".join(err)
    name = "mpitrain: rank 1 of 3 (worker 1) on h2, process"
    messages = [line for line in err if line.startswith("mpitrain:")]
    assert messages[0].startswith(f"{name} {first}, was killed by signal 11 (SIGSEGV), in step ")
    (last,) = [index for index, line in enumerate(err) if line.startswith(f"{name} {second}, was killed by signal 9 ")]
    assert ", in step " in err[last] and "--max-restarts 1" in err[last + 1]
    # Only a message on the state in memory may follow, if this state is newer than the last checkpoint.
    assert all(line.startswith("mpitrain:") and ".h5" in line for line in err[last + 2 :])


@pytest.mark.parametrize("times", [1, 2])
def test_control_c_leaves_no_process_on_any_host(runs: StartRun, mpi: Mpi, times: int) -> None:
    run = runs(mpi)
    run.wait_for_ranks()
    for _ in range(times):
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.15)  # two simultaneous signals count as one
    status, out, err = run.end()
    # At the second signal, the run may have saved already, and be about to end.
    assert status == STOPPED_EARLY or (times == 2 and status == 128 + signal.SIGINT), out + "\n".join(err)
    for path in checkpoint.steps(run.run_dir / "checkpoints").values():
        checkpoint.verify(path)
    assert json.loads((run.run_dir / "status.json").read_text())["state"] == "stopped" or times == 2


def test_a_host_that_does_not_answer_is_named(runs: StartRun, openmpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "gone").write_text("3\n")
    run = runs(openmpi)
    status, _, err = run.end()
    assert status == 1
    there = f"host {run.network.net}.3 does not answer: ssh: connect to host h3 port 22: No route to host"
    assert err[-2:] == [f"mpitrain: {there}", err[-1]]
    assert not (run.run_dir / "ranks.txt").exists(), "no rank has started"
