"""Programs over the MPI backend, started by ``mpitrain run``: ranks that are stopped, hang or die are named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpitrain.process.run_directory import read_failure

from ..support.launch import PROGRAMS, Mpi, run


@pytest.mark.parametrize("action", ["none", "stop", "hang", "kill"])
def test_the_rank_that_makes_the_others_wait_is_named(action: str, openmpi: Mpi, tmp_path: Path) -> None:
    limit_s = "60" if action == "none" else "4"
    flags = ["-n", "2", "--hang-timeout", limit_s, "--long-timeout", limit_s, "--run-dir", str(tmp_path)]
    command = [sys.executable, "-m", "mpitrain", "run", *flags, str(PROGRAMS / "backend_loop.py"), action]
    done = run(command, timeout=90)
    failure = read_failure(tmp_path)
    if action == "none":
        assert done.returncode == 0 and failure is None, done.stderr
    else:
        assert done.returncode == 1 and failure is not None and failure.rank == 1, done.stderr


@pytest.mark.parametrize(
    "waits", ["comm.Barrier()", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); time.sleep(60)"]
)
def test_a_rank_that_exits_before_mpi_ends_fails_the_run(mpi: Mpi, waits: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\ncomm.Barrier()\n"
        f"if comm.rank == 1:\n    os._exit(0)\n{waits}\n"
    )
    done = run([str(mpi.python), "-m", "mpitrain", "run", "-n", "2", "--run-dir", str(tmp_path / "run"), str(script)])
    failure = read_failure(tmp_path / "run")
    assert done.returncode == 1 and failure is not None and failure.rank == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1
