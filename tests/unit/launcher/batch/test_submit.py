"""``mpitrain submit``: the batch job that a request describes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpitrain.batch_systems.job import Batch, Point
from mpitrain.batch_systems.resources import Resources
from mpitrain.errors import ConfigError
from mpitrain.launcher.batch.request import SubmitOptions, SubmitRequest
from mpitrain.launcher.batch.submit import make_batch
from mpitrain.plan.request import JobRequest

JOB = Path("job.py")


def made(folder: Path, resources: Resources, points: tuple[Point, ...] = (), **options: object) -> Batch:
    request = SubmitRequest(resources, SubmitOptions(), JobRequest(JOB, options), points)
    return make_batch(request, folder, sys.executable)


def test_the_elements_of_an_array_are_learners_of_one_run(tmp_path: Path) -> None:
    batch = made(tmp_path, Resources(array="0-2"), join=Path("runs/a"))
    learners = tmp_path / "runs" / "a" / "learners"
    assert batch.run_dirs(0) == [(index, learners / f"task-{index}") for index in range(3)]
    assert not batch.seeds and batch.arguments[-2:] == ["--join", "runs/a"]


def test_a_single_learner_has_a_directory_of_its_own(tmp_path: Path) -> None:
    first = made(tmp_path, Resources(), join=Path("runs/a"))
    assert first.run_dir.parent == tmp_path / "runs" / "a" / "learners"
    first.run_dir.mkdir(parents=True)
    assert made(tmp_path, Resources(), join=Path("runs/a")).run_dir != first.run_dir


@pytest.mark.parametrize(("run_dir", "array"), [("elsewhere", None), ("runs/a/learners/x", "0-2")])
def test_a_directory_that_is_not_that_of_a_learner_is_refused(tmp_path: Path, run_dir: str, array: str | None) -> None:
    with pytest.raises(ConfigError, match="--run-dir"):
        made(tmp_path, Resources(array=array), join=Path("runs/a"), run_dir=Path(run_dir))


def test_a_sweep_of_learners_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--sweep"):
        made(tmp_path, Resources(), (Point("a", ("--seed", "1")),), join=Path("runs/a"))
