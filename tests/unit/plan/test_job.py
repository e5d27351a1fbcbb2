"""Errors of the code of job files, and the length of a run."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain import Job, data, nn, optim
from mpitrain.errors import ConfigError, JobError
from mpitrain.plan.config import RunConfig
from mpitrain.plan.job import load_job_file
from mpitrain.plan.plan import make_plan
from mpitrain.plan.progress import Progress


def test_an_error_in_a_module_of_the_user_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text("from mpitrain import Job\n\nimport module_with_an_error\n\n\ndef job() -> Job: ...\n")
    Path("module_with_an_error.py").write_text("import json\n\n\njson.loads('?')\n")
    with pytest.raises(JobError, match=r"^job\.py, line 3, in module_with_an_error\.py, line 4: JSONDecodeError"):
        load_job_file(Path("job.py"))


def test_a_job_file_that_closes_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    path = tmp_path / "closing.py"
    path.write_text("import sys\n\nsys.stdout.close()\n\n\ndef job(): ...\n")
    with pytest.raises(JobError, match="stdout"):
        load_job_file(path)


def job_of_100_examples(**options: Any) -> Job:
    split = data.from_arrays(np.zeros((100, 3), np.float32), np.arange(100) % 2)
    return Job(nn.Sequential(nn.Dense(3, 2)), nn.SoftmaxCrossEntropy(), optim.sgd(0.1), split, batch_size=8, **options)


@pytest.mark.parametrize(
    ("in_job", "options", "begin", "steps"),
    [
        ({}, {}, (0, 0), 1000),
        ({"train_steps": 0}, {}, (0, 0), 0),
        ({"train_epochs": 2}, {}, (0, 0), 9),  # 200 examples, 24 in a step of three workers
        ({"train_epochs": 2}, {"train_steps": 5}, (0, 0), 5),
        ({"train_epochs": 2}, {"train_epochs": 1}, (0, 0), 5),
        ({"train_steps": 7}, {"train_epochs": 1, "batch_size": 4}, (0, 0), 9),
        ({}, {"train_epochs": 2, "mode": "async"}, (0, 0), 25),
        ({"train_epochs": 2}, {}, (4, 96), 9),
        ({"train_epochs": 2}, {}, (20, 160), 22),  # the steps before had 8 examples
        ({"train_epochs": 2}, {}, (30, 240), 30),
        ({"train_epochs": 2}, {"mode": "backup", "backup_workers": 1}, (5, 120), 13),  # 40 of the 120 were dropped
    ],
)
def test_the_length_of_a_run(
    in_job: dict[str, int], options: dict[str, Any], begin: tuple[int, int], steps: int
) -> None:
    job = job_of_100_examples(**in_job)
    plan = make_plan(job, job.completed(RunConfig.of(**options)), 3)
    plan.length.begin(Progress(*begin))
    assert plan.length.train_steps == steps


def test_steps_and_epochs_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="--train-steps 5 and --train-epochs 2"):
        RunConfig.of(train_steps=5, train_epochs=2)
    for options in ({"train_epochs": 2, "train_steps": 1000}, {"train_epochs": 0}, {"train_epochs": 1.5}):
        with pytest.raises(JobError, match="train_epochs"):
            job_of_100_examples(**options)


@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 3}, {"accumulate_steps": 8}], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_shares_of_the_workers_are_the_step(workers: int, options: dict[str, int]) -> None:
    plan = make_plan(job_of_100_examples(), RunConfig.of(batch_size=8, **options), workers)
    taken = []
    for share in map(plan.share_of, range(workers)):
        assert len(share.micro_batches) == options.get("accumulate_steps", 1)
        taken += range(share.offset, share.offset + sum(share.micro_batches))
    assert taken == list(range(plan.step_examples))
