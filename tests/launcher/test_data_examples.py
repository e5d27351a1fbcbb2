"""The example jobs of the guide "Data" train; two train on files that they have written. Files that change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..support.launch import ROOT, Mpi, one_line, run
from ..support.world.controller import World


def validation(run_dir: Path) -> dict[str, float]:
    """Return the last validation of a run."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "validation_loss" in line][-1]


@pytest.mark.parametrize(
    ("name", "written", "flags", "metric", "least"),
    [
        ("images", "digits", ["--folder", "digits", "--filters", "4", "--data-workers", "1"], "accuracy", 0.3),
        ("tabular", "loans.parquet", ["--table", "loans.parquet"], "auc", 0.8),
        ("texts", "", ["--reviews", "2000"], "accuracy", 0.52),
    ],
)
def test_an_example_trains(
    openmpi: Mpi, tmp_path: Path, name: str, written: str, flags: list[str], metric: str, least: float
) -> None:
    job = ROOT / "jobs" / f"{name}.py"
    if written:
        assert run([str(openmpi.python), str(job), str(tmp_path / written)]).returncode == 0
    flags = [str(tmp_path / flag) if flag == written else flag for flag in flags]
    openmpi.train(2, job, "--train-steps", "60", "--run-dir", tmp_path / "run", *flags)
    assert validation(tmp_path / "run")[f"validation_{metric}"] > least


TABLE_JOB = """
from mpitrain import Job, data, nn, optim

def job(rate: float = 0.1) -> Job:
    split = data.csv("part-*.csv", label="y")
    return Job(model=nn.Dense(1, 1), loss=nn.MeanSquaredError(), optimizer=optim.sgd(rate), train=split, batch_size=2)
"""


def write_parts(folder: Path, *values: float) -> None:
    for number, value in enumerate(values):
        rows = "".join(f"{value + row},{row}\n" for row in range(8))
        (folder / f"part-{number}.csv").write_text("x,y\n" + rows)


@pytest.mark.quick
@pytest.mark.parametrize("values", [(0, 1, 2), (0,), (0, 10)])
def test_a_run_does_not_resume_on_other_data(world: World, tmp_path: Path, values: tuple[float, ...]) -> None:
    """A file more, a file less, and a file with values of another length."""
    (tmp_path / "job.py").write_text(TABLE_JOB)
    write_parts(tmp_path, 0, 1)
    for steps, rate in (("2", "0.1"), ("4", "0.05")):  # options may change
        world.train(2, "job.py", "--run-dir", "run", "--train-steps", steps, "--rate", rate, cwd=tmp_path)
    for path in tmp_path.glob("part-*"):
        path.unlink()
    write_parts(tmp_path, *values)
    for where in (["run"], ["third", "--resume", "run"]):
        line = world.refusal(2, "job.py", "--train-steps", "6", "--run-dir", *where, cwd=tmp_path)
        assert "training data" in line
    world.train(2, "job.py", "--run-dir", "other", "--init-from", "run", "--train-steps", "1", cwd=tmp_path)


def test_hosts_with_other_files_are_refused(openmpi: Mpi, tmp_path: Path) -> None:
    """Each rank has its own folder, in which the first examples are the same."""
    for rank, values in enumerate([(0, 1), (0, 1, 2)]):
        (tmp_path / str(rank)).mkdir()
        write_parts(tmp_path / str(rank), *values)
    job = TABLE_JOB.replace('"part', 'os.environ["OMPI_COMM_WORLD_RANK"] + "/part')
    (tmp_path / "job.py").write_text("import os\n" + job)
    done = openmpi.run(2, "-m", "mpitrain", "train", "job.py", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode != 0 and "training examples" in one_line(done.stderr)
