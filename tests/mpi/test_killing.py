"""A short form of ``bench/kills.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.kills import Killer
from ..support.launch import Mpi


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_killed_run_continues_as_if_it_had_not_been(openmpi: Mpi, n: int, tmp_path: Path) -> None:
    killer = Killer(openmpi, n, tmp_path, seed=10 + n)
    killer.kill(3)
    assert killer.counts["kills"] == 3
    assert killer.counts["checkpoints that verify"] > 0
