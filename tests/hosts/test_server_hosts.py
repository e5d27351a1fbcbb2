"""All modes on three hosts: runs train and end, and no process is left."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ..support.hosts.training import Hosts
from ..support.kills import ranks_of
from ..support.launch import JOBS, one_line
from ..support.results import SMALL, assert_close, final

PLAIN = "--no-normalize"


def accuracy(done: subprocess.CompletedProcess[str]) -> float:
    return float(done.stdout.split("accuracy ")[-1].split()[0])


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        ([1, 1, 1], ("--mode", "async", "--ps", "1")),
        ([2, 2, 2], ("--mode", "async", "--ps", "3", "--staleness-scaling")),
        ([2, 1, 1], ("--mode", "ssp", "--ps", "1", "--staleness", "1")),
        ([2, 2, 1], ("--mode", "backup", "--ps", "2")),
        ([1, 1, 1], ("--mode", "async", "--ps", "1", "--no-one-sided")),
        ([2, 1, 1], ("--mode", "backup", "--ps", "1", "--no-one-sided")),
        ([2, 1, 1], ("--mode", "local", "--local-steps", "5")),
        ([1, 1, 1], ("--mode", "local", "--elastic-rho", "0.3")),
    ],
    ids=str,
)
def test_every_mode_trains_and_ends(hosts: Hosts, ranks: list[int], flags: tuple[str, ...], tmp_path: Path) -> None:
    done = hosts.train(ranks, SMALL, PLAIN, "--train-steps", "200", "--run-dir", tmp_path, *flags)
    assert accuracy(done) > 0.8
    assert "on 3 nodes" in done.stdout
    assert not ranks_of(tmp_path)


@pytest.mark.parametrize("flags", [("--ps", "1"), ("--ps", "3"), ("--ps", "2", "--clip-norm", "0.5")], ids=" ".join)
def test_backup_with_no_spare_worker_is_sync(hosts: Hosts, alone, flags: tuple[str, ...], tmp_path: Path):
    same = ("--dtype", "float64", PLAIN, *(flags[2:]))
    words = ("--mode", "backup", "--backup-workers", "0", "--batch-size", "4", "--ps", flags[1])
    servers = int(flags[1])
    ranks = {1: [2, 1, 1], 2: [2, 2, 1], 3: [2, 2, 2]}[servers]
    hosts.train(ranks, SMALL, "--run-dir", tmp_path, *words, *same)
    assert_close(final(tmp_path), alone(*same), 1e-12)


def test_an_epoch_is_each_example_once(hosts: Hosts, tmp_path: Path) -> None:
    words = ["--mode", "async", "--ps", "1", "--batch-size", "9", "--train-steps", "20", "--run-dir", tmp_path]
    hosts.train([2, 1, 1], JOBS / "recording.py", *words)


def test_servers_are_where_they_are_asked_to_be(hosts: Hosts, tmp_path: Path) -> None:
    flags = ["--mode", "async", "--ps", "2", "--ps-hosts", "h3,h2", "--train-steps", "20", "--run-dir", tmp_path]
    hosts.train([1, 2, 2], SMALL, PLAIN, *flags)
    rows = [line.split() for line in (tmp_path / "ranks.txt").read_text().splitlines()[1:]]
    servers = {row[3]: row[1] for row in rows if row[2] == "ps"}
    assert servers == {"0": "h3", "1": "h2"}


def test_no_server_on_several_hosts_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    done = hosts.start([1, 1], SMALL, PLAIN, "--mode", "async", "--run-dir", tmp_path)
    assert done.returncode == 2
    assert "--ps 1" in one_line(done.stderr)
