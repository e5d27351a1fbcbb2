"""Synchronous training over several hosts is synchronous training on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..mpi.test_sync import SMALL, alone, assert_close, assert_same_bits, final  # noqa: F401
from .conftest import Hosts


@pytest.mark.parametrize("flags", [(), ("--bucket-bytes", "0"), ("--no-shared-memory",)], ids=" ".join)
@pytest.mark.parametrize("ranks", [[1, 1, 1], [2, 2], [2, 1, 1]], ids=str)
def test_hosts_agree_with_one_rank(hosts: Hosts, alone, ranks: list[int], flags: tuple[str, ...], tmp_path: Path):  # noqa: F811
    batch = str(12 // sum(ranks))
    done = hosts.train(ranks, SMALL, "--dtype", "float64", "--batch-size", batch, "--run-dir", tmp_path, *flags)
    assert f"on {len(ranks)} nodes" in done.stdout
    assert_close(final(tmp_path), alone("--dtype", "float64"), 1e-12)


@pytest.mark.parametrize("what", [("--optimizer", "lamb"), ("--clip-norm", "0.5")], ids=" ".join)
def test_norms_are_of_all_hosts(hosts: Hosts, alone, what: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    flags = ("--dtype", "float64", *what)
    hosts.train([2, 1, 1], SMALL, "--batch-size", "3", "--run-dir", tmp_path, *flags)
    assert_close(final(tmp_path), alone(*flags), 1e-12)


def test_a_run_twice_is_the_same_bits(hosts: Hosts, tmp_path: Path) -> None:
    for name in "ab":
        hosts.train([2, 1, 1], SMALL, "--bucket-bytes", "0", "--run-dir", tmp_path / name)
    assert_same_bits(final(tmp_path / "a"), final(tmp_path / "b"))
