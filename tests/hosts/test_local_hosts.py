"""Local SGD over several hosts gives the results of local SGD on one host."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.hosts.training import Hosts
from ..support.launch import JOBS, Mpi
from ..support.results import assert_close, assert_same_bits, final

LINEAR = JOBS / "linear.py"
FLAGS = ("--mode", "local", "--outer-optimizer", "nesterov", "--local-steps", "8", "--save-steps", "8")


@pytest.mark.parametrize("how", [(), ("--fragments", "2", "--overlap-steps", "3")], ids=" ".join)
def test_hosts_agree_with_one(hosts: Hosts, openmpi: Mpi, how: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*FLAGS, *how, "--dtype", "float64", "--run-dir")
    openmpi.train(3, LINEAR, *flags, tmp_path / "one", timeout=150)
    hosts.train([2, 1], LINEAR, *flags, tmp_path / "several")
    assert_close(final(tmp_path / "several"), final(tmp_path / "one"), 1e-12)


def test_a_resumed_run_is_the_same_bits(hosts: Hosts, tmp_path: Path) -> None:
    flags = (*FLAGS, "--fragments", "2", "--overlap-steps", "3", "--no-save-background", "--run-dir")
    hosts.train([2, 1], LINEAR, *flags, tmp_path / "whole")
    end = ("--signal-name", "SIGKILL", "--at-step", "27", "--mark", tmp_path / "mark")
    assert hosts.start([2, 1], LINEAR, *flags, tmp_path / "parts", *end).returncode != 0
    assert "resumed from" in hosts.train([2, 1], LINEAR, *flags, tmp_path / "parts", *end).stdout
    assert_same_bits(final(tmp_path / "parts"), final(tmp_path / "whole"))
