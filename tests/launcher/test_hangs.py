"""Ranks that make no progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.launch import JOBS, Mpi, run

JOB = JOBS / "hanging.py"
LIMIT = ("--hang-timeout", "2")
FRAMES = {"loop": "in forward", "sleep": "in after_step", "stop": ""}


@pytest.mark.parametrize(
    ("kind", "rank", "flags"),
    [
        ("loop", 1, ()),
        ("sleep", 0, ()),
        ("stop", 1, ("--mode", "local")),
        ("sleep", 1, ("--mode", "async")),
        ("loop", 2, ("--mode", "ssp", "--ps", "1", "--ps-placement", "first")),
        ("stop", 1, ("--mode", "backup")),
    ],
    ids=str,
)
def test_the_rank_that_hangs_is_reported_and_ended(
    mpi: Mpi, kind: str, rank: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    words = ["-m", "mpitrain", "train", JOB, "--kind", kind, "--rank", str(rank), *LIMIT, *flags]
    done = mpi.run(3, *words, "--run-dir", tmp_path, timeout=50)
    assert done.returncode == 124 if mpi.name == "openmpi" else done.returncode not in (0, 2)
    reports = [line for line in done.stderr.splitlines() if "made no progress" in line]
    assert [line.split()[2] for line in reports] == [str(rank)], done.stderr
    assert FRAMES[kind] in done.stderr


def test_a_hanging_run_is_restarted(openmpi: Mpi, tmp_path: Path) -> None:
    words = ["--kind", "sleep", "--steps", "40", *LIMIT, "--run-dir", str(tmp_path), "--save-steps", "10"]
    command = [str(openmpi.python), "-m", "mpitrain", "run", "-n", "2", "--max-restarts", "1", str(JOB), *words]
    done = run(command, timeout=80)
    assert done.returncode == 1  # it hangs again in the first step after the checkpoint
    assert done.stderr.count("made no progress") == 4  # each attempt: the reaper with the stacks, then the launcher
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000000010.h5"]
