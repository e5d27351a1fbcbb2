"""The records of each start of a run, in its run directory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mpitrain.core.toml import read_toml
from mpitrain.monitor.run_record import RunRecord


def start(folder: Path, job_file: Path, step: int = 0, **options: object) -> list[str]:
    """Record a start; return the changed options."""
    run = {"mode": "sync", "batch_size": 100, "run_dir": str(folder), **options}
    record = RunRecord(folder, {"run": run, "job": {"hidden_units": 8}, "versions": {"numpy": "2"}}, job_file, "rank")
    changes = record.changes()
    record.write(step)
    return changes


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "job.py"
    path.parent.mkdir()
    path.write_text("first = 1\n")
    return path


def history(folder: Path) -> dict[str, list[str]]:
    return {path.name: sorted(file.name for file in path.iterdir()) for path in sorted(folder.glob("history/*"))}


def test_every_version_of_the_options_and_the_job_is_kept(tmp_path: Path, job_file: Path) -> None:
    assert start(tmp_path, job_file) == []
    assert start(tmp_path, job_file, 10, time_limit=60.0, resume="never") == []  # neither option changes the training
    assert list(history(tmp_path)) == ["0001-step-0"]
    changes = start(tmp_path, job_file, 20, batch_size=50, log_steps=1)
    assert changes == ["--batch-size: 100 -> 50", "--log-steps: none -> 1"]
    job_file.write_text("second = 2\n")
    assert start(tmp_path, job_file, 30, batch_size=50, log_steps=1) == []
    expected = ["0001-step-0", "0002-step-20", "0003-step-30"]
    assert history(tmp_path) == {name: ["config.toml", "job.py"] for name in expected}
    sizes = [read_toml(tmp_path / "history" / name / "config.toml")["run"]["batch_size"] for name in expected]
    assert sizes == [100, 50, 50]
    sources = [(tmp_path / "history" / name / "job.py").read_text() for name in expected]
    assert sources == ["first = 1\n", "first = 1\n", "second = 2\n"]
    assert read_toml(tmp_path / "config.toml")["run"]["batch_size"] == 50


def test_the_options_of_an_older_version_are_kept(tmp_path: Path, job_file: Path) -> None:
    (tmp_path / "config.toml").write_text('[run]\nmode = "sync"\nbatch_size = 7\n')
    changes = start(tmp_path, job_file)
    assert "--batch-size: 7 -> 100" in changes
    assert history(tmp_path) == {"0001-step-0": ["config.toml"], "0002-step-0": ["config.toml", "job.py"]}


@pytest.mark.full
def test_the_commit_and_the_changes_to_it_are_kept(tmp_path: Path, job_file: Path) -> None:
    git = ["git", "-C", str(job_file.parent), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "job.py"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True).stdout
    start(tmp_path / "run", job_file)
    entry = tmp_path / "run" / "history" / "0001-step-0"
    assert (entry / "git-commit.txt").read_bytes() == commit
    assert not (entry / "git-diff.patch").exists()
    job_file.write_text("second = 2\n")
    start(tmp_path / "run", job_file)
    assert "+second = 2" in (tmp_path / "run" / "history" / "0002-step-0" / "git-diff.patch").read_text()
