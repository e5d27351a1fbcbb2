"""Programs over the MPI backend, started by ``mpitrain run``: ranks that are stopped, hang or die are named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpitrain.process.failure import read_failure

from ..support.launch import PROGRAMS, Mpi, run


@pytest.mark.parametrize("action", ["none", "stop", "hang", "kill"])
def test_the_rank_that_makes_the_others_wait_is_named(action: str, openmpi: Mpi, tmp_path: Path) -> None:
    flags = ["-n", "2", "--hang-timeout", "4", "--long-timeout", "4", "--run-dir", str(tmp_path)]
    command = [sys.executable, "-m", "mpitrain", "run", *flags, str(PROGRAMS / "backend_loop.py"), action]
    done = run(command, timeout=90)
    failure = read_failure(tmp_path)
    if action == "none":
        assert done.returncode == 0 and failure is None, done.stderr
    else:
        assert done.returncode == 1 and failure is not None and failure.rank == 1, done.stderr
