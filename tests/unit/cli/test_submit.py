"""``mpitrain submit``: the script that it prints, and the state of a submitted run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpitrain.cli.main import main
from mpitrain.monitor.heartbeat import read

from ...support.launch import JOBS


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (("-N", "2", "-n", "8"), ("--nodes", "2", "--tasks-per-node", "4")),
        (("-n", "3"), ("--tasks-per-node", "3")),
        (("-N2", "--ntasks-per-node=4"), ("--nodes", "2", "--tasks-per-node", "4")),
        (("-p", "gpu", "-t", "30", "-A", "acc"), ("--partition", "gpu", "--time", "30", "--account", "acc")),
    ],
    ids=str,
)
def test_slurms_spellings_of_flags(given: tuple[str, ...], same: tuple[str, ...], capsys, tmp_path: Path) -> None:
    job, last = str(JOBS / "small.py"), ("--run-dir", str(tmp_path), "--dry-run")
    scripts = []
    for words in ((*given, job), (job, *given), (*same, job)):
        assert main(["submit", *words, *last]) == 0
        scripts.append(capsys.readouterr().out)
    assert scripts[0] == scripts[1] == scripts[2]


@pytest.mark.parametrize(
    ("flags", "tasks"),
    [
        ((), {"": "4711"}),
        (("--array", "1,4-9:5%2"), {"task-1": "4711_1", "task-4": "4711_4", "task-9": "4711_9"}),
        (("--sweep", "hidden_units=5,6"), {"hidden_units=5": "4711_0", "hidden_units=6": "4711_1"}),
        (("--array", "1", "--scheduler", "lsf"), {"task-2": "4711"}),
        (("--scheduler", "flux"), {"": "ƒ4711"}),
    ],
    ids=str,
)
def test_a_submitted_run_has_a_state(
    flags: tuple[str, ...], tasks: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, answer in (("sbatch", "4711"), ("bsub", "Job <4711> is submitted"), ("flux", "ƒ4711")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{answer}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run_dir, job = tmp_path / "run", str(JOBS / "small.py")
    assert main(["submit", "--run-dir", str(run_dir), "--job-name", "night", "-N", "2", *flags, job]) == 0
    found = {folder: read(run_dir / folder) for folder in tasks}
    assert {folder: status.job.job_id for folder, status in found.items() if status and status.job} == tasks
    assert {status.state for status in found.values() if status} == {"submitted"}


def test_a_value_with_a_dash_is_no_short_flag(tmp_path: Path, capsys) -> None:
    job = tmp_path / "job.py"
    job.write_text("def job(least: float = 0.0, tag: str = ''):\n    raise NotImplementedError\n")
    words = ["--run-dir", "-night", str(job), "--least", "-inf", "--tag", "-p"]
    assert main(["submit", "--dry-run", *words]) == 0
    (command,) = (line for line in capsys.readouterr().out.splitlines() if "--run-dir" in line)
    assert "--least=-inf --tag=-p &" in command


def test_a_given_run_directory_is_in_the_script_once(tmp_path: Path, capsys) -> None:
    assert main(["submit", "--run-dir", str(tmp_path / "own"), "--dry-run", str(JOBS / "small.py"), "--seed", "3"]) == 0
    script = capsys.readouterr().out
    (command,) = (line for line in script.splitlines() if "--run-dir" in line)
    assert command.count("--run-dir") == 1 and "--seed 3" in command
    assert f"run_dir={tmp_path}/own" in script.splitlines()


@pytest.mark.parametrize(
    ("flags", "name", "command"),
    [
        ((), "#SBATCH --job-name=small", "-m mpitrain run "),
        (("--launcher", "srun"), "#SBATCH --job-name=small", "srun --mpi="),
        (("--ps-nodes", "1", "--mode", "async", "--ps", "1"), "#SBATCH --job-name=small", "srun --mpi="),
        (("--sweep", "hidden_units=1,2"), "#SBATCH --job-name=small", "-m mpitrain run "),
        (("--scheduler", "pbs"), "#PBS -N small", "-m mpitrain run -n 2 "),
        (("--scheduler", "lsf"), '#BSUB -J "small"', "-m mpitrain run -n 2 "),
        (("--scheduler", "flux"), "# flux: --job-name=small", "-m mpitrain run -n 2 "),
    ],
    ids=str,
)
def test_the_script_that_the_command_prints(
    flags: tuple[str, ...], name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The flags that are not given reach the script as absent, whatever click uses for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["submit", "--dry-run", "--nodes", "2", *flags]
    job = str(JOBS / "small.py")
    assert main([*words, job]) == 0
    script = capsys.readouterr().out
    assert name in script.splitlines()
    assert command in script
    assert "Sentinel" not in script
    assert "None" not in script
