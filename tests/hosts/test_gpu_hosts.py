"""Sums between GPUs of several hosts, which the CuPy simulator provides."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.hosts.training import Hosts
from ..support.results import SMALL, assert_close, final


@pytest.mark.parametrize(
    ("ranks", "way", "more"),
    [
        ([2, 2], "host", ["--bucket-bytes", "100"]),
        ([2, 1, 1], "host", []),
        ([2, 1, 1], "host", ["--save-per-node"]),
        ([2, 1, 1], "nccl", ["--bucket-bytes", "100"]),
    ],
    ids=str,
)
def test_gpus_of_hosts_agree_with_one_rank(
    hosts: Hosts, simulated: dict[str, str], alone, ranks: list[int], way: str, more: list[str], tmp_path: Path
) -> None:
    flags = ["--dtype", "float64", "--batch-size", "3", "--run-dir", tmp_path, "--device", "gpu"]
    env = {**simulated, "SIMULATED_GPUS": "4", "SIMULATED_NCCL": "1"}
    done = hosts.train(ranks, SMALL, *flags, "--gpu-transport", way, *more, env=env)
    assert f"on {len(ranks)} nodes" in done.stdout and f"GPU transport: {way}" in done.stdout
    assert_close(final(tmp_path), alone("--dtype", "float64"), 1e-9)
