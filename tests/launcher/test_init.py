"""``mpitrain init`` and ``mpitrain demo``: the generated files work without changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..support.launch import Mpi, one_line, run
from ..support.projects import make_project


def test_a_project_of_layers(openmpi: Mpi, tmp_path: Path) -> None:
    make_project(openmpi, tmp_path / "new" / "project", "native")


def test_no_file_is_overwritten(openmpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "test_job.py").write_text("mine")
    done = run([str(openmpi.python), "-m", "mpitrain", "init", str(tmp_path)])
    assert done.returncode == 2
    assert "test_job.py" in one_line(done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["test_job.py"]
    assert (tmp_path / "test_job.py").read_text() == "mine"


@pytest.mark.parametrize("words", [["mpitrain", "demo"], ["mpitrain.demo"]])
def test_the_demo_trains_on_two_ranks(openmpi: Mpi, words: list[str], tmp_path: Path) -> None:
    flags = ["--run-dir", str(tmp_path / "run"), "--hidden-units", "20", "--train-steps", "300"]
    done = run([str(openmpi.python), "-m", *words, *flags], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["validation_accuracy"] > 0.8
    assert len((tmp_path / "run" / "ranks.txt").read_text().splitlines()) == 3
