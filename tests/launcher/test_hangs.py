"""Ranks that make no progress."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mpitrain.cli.main import main
from mpitrain.process.stacks import RankStacks, ask

from ..support.launch import JOBS, LAUNCHER_ENVIRONMENT, Mpi, one_line, run
from ..support.waiting import limit, wait_until

JOB = JOBS / "hanging.py"
LIMIT = ("--hang-timeout", "4")
FRAMES = {"loop": "in forward", "sleep": "in after_step", "stop": ""}


@pytest.mark.parametrize(
    ("mpi", "kind", "rank", "flags"),
    [
        ("mpich", "loop", 1, ()),
        ("openmpi", "sleep", 0, ("--at", "10")),  # other ranks wait for rank 0 to compare computing times
        ("mpich", "stop", 1, ("--mode", "local")),
        ("openmpi", "sleep", 1, ("--mode", "async")),
        ("openmpi", "loop", 2, ("--mode", "ssp", "--ps", "1", "--ps-placement", "first")),
        ("openmpi", "stop", 1, ("--mode", "backup")),
    ],
    ids=str,
    indirect=["mpi"],
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
    assert done.returncode == 1  # it hangs again after the restart
    assert done.stderr.count("made no progress") == 4  # per attempt: the reaper with the stacks, then the launcher
    saved, *from_memory = sorted(int(path.stem.removeprefix("step-")) for path in (tmp_path / "checkpoints").iterdir())
    assert saved == 10
    # At the end a newer state in memory is saved; when the state is copied to memory depends on the speed.
    assert len(from_memory) <= 1 and all(10 < step < 20 for step in from_memory)


def test_stacks_report_who_waits_for_whom(openmpi: Mpi, tmp_path: Path) -> None:
    """``mpitrain stacks`` reports which rank each rank waits for, under plain mpirun; then the run ends by itself."""
    words = ["-m", "mpitrain", "train", str(JOB), "--kind", "stop", "--hang-timeout", "8", "--run-dir", str(tmp_path)]
    command = [*openmpi.command(3), str(openmpi.python), *words]

    def answers_after_the_stop() -> list[RankStacks]:
        answers = ask(tmp_path, 3, 5.0)  # other ranks may wait for rank 1 before it has stopped
        waiting = [(rank.waits_for, rank.state in "tT") for rank in answers]
        return answers if waiting == [(1, False), (None, True), (1, False)] else []

    with subprocess.Popen(command, env={**os.environ, **LAUNCHER_ENVIRONMENT}, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until((tmp_path / "ranks.txt").exists, "ranks.txt", process=process)
            answers = wait_until(answers_after_the_stop, lambda: ask(tmp_path, 3, 5.0), process=process, poll_s=0.1)
            assert [bool(rank.stacks) for rank in answers] == [True, False, True]
            assert [rank.role for rank in answers] == ["worker 0", "worker 1", "worker 2"]
            assert main(["stacks", str(tmp_path)]) == 0
            assert process.wait(timeout=limit(40)) == 124
        finally:
            process.kill()
    assert not (tmp_path / "logs" / ".stacks").exists()


def test_stacks_of_a_run_that_has_ended(openmpi: Mpi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    openmpi.train(1, JOBS / "small.py", "--train-steps", "1", "--run-dir", tmp_path)
    assert main(["stacks", str(tmp_path)]) == 2
    assert str(tmp_path) in one_line(capsys.readouterr().err)
