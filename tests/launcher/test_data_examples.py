"""The example jobs of the guide "Data" train; two of them train on files that they have written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..support.launch import ROOT, Mpi, run


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
