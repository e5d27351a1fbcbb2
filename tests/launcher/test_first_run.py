"""A user's first run on a machine."""

from __future__ import annotations

from pathlib import Path

from ..support.launch import JOBS, Mpi


def test_compiling_is_reported_once(openmpi: Mpi, tmp_path: Path) -> None:
    env = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    words = ("--train-steps", "3", "--run-dir", tmp_path / "run")
    first = openmpi.train(2, JOBS / "small.py", *words, env=env, timeout=120)
    assert first.stdout.count("\ncompiling kernels") == 1
    again = openmpi.train(2, JOBS / "small.py", *words, "--resume", "never", env=env)
    assert "\ncompiling kernels" not in again.stdout
