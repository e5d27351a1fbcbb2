"""``mpitrain submit``: the batch job that a request describes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from mpitrain.batch_systems.base import JobState
from mpitrain.batch_systems.job import Batch, Point
from mpitrain.batch_systems.resources import Resources
from mpitrain.batch_systems.slurm import Slurm
from mpitrain.errors import ConfigError
from mpitrain.launcher.batch import submit as submit_module
from mpitrain.launcher.batch.request import SubmitOptions, SubmitRequest
from mpitrain.launcher.batch.submit import make_batch
from mpitrain.monitor.heartbeat import BatchJob, write_submitted
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


@pytest.mark.parametrize(
    ("array", "named"),
    [
        ("0-7", ("0-3", "4-7")),
        ("2-4,9", ("2-3", "4,9")),
        ("0-3", ("0-3", "4-7")),
        ("4-7", ()),
        ("1,3%1", ("1,3", "4-5")),
    ],
)
@pytest.mark.parametrize("waits", [True, False])
def test_elements_that_are_learners_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: str, named: tuple[str, ...], waits: bool
) -> None:
    """They are refused together with new ones, and while their jobs wait."""
    first = made(tmp_path, Resources(array="0-3"), join=Path("runs/a"))
    for index, folder in first.run_dirs(0):
        write_submitted(folder, "1 rank", BatchJob("slurm", f"7_{index}", "job"))
    asked = list[str]()

    def job_states(self: Slurm, jobs: Iterable[str]) -> dict[str, JobState]:
        asked.extend(jobs)
        return dict.fromkeys(asked, JobState("PENDING" if waits else "TIMEOUT", has_ended=not waits))

    monkeypatch.setattr(Slurm, "states", job_states)
    resources = Resources(array=array)
    if array == "4-7" or (not waits and array in ("0-3", "1,3%1")):
        assert (made(tmp_path, resources, join=Path("runs/a")).script == first.script) is (array == "0-3")
        return
    with pytest.raises(ConfigError) as caught:
        made(tmp_path, resources, join=Path("runs/a"))
    assert all(re.search(rf"\b{indexes}\b", str(caught.value)) for indexes in named)


def test_the_hints_name_the_run_of_an_array_of_learners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(submit_module, "submit", lambda *_: "7")
    request = SubmitRequest(Resources(array="0-3"), SubmitOptions(), JobRequest(JOB, {"join": Path("runs/a")}))
    submit_module.submit_job(request)
    words = capsys.readouterr().out.split()
    assert words.count("runs/a") == 2 and "runs/a/learners" not in words


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
