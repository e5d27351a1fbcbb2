"""Runs that Python submits to PBS, LSF and Flux, which are simulated by programs that run the scripts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import mpitrain
from mpitrain.plan.job import load_job_file

from ..support.launch import JOBS, LAUNCHER_ENVIRONMENT, ROOT, Mpi
from ..support.waiting import wait_until

SLOW = JOBS / "slow.py"


@pytest.mark.parametrize("scheduler", ["pbs", "lsf", "flux"])
def test_a_submitted_run_is_stopped_and_resumed(
    openmpi: Mpi, scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{ROOT / 'tests' / 'support' / 'stand_ins'}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_JOBS", str(tmp_path))
    for name, value in LAUNCHER_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def submit(**options: object) -> mpitrain.Run:
        function = lambda pause=0.0: load_job_file(SLOW)(pause)  # noqa: E731
        return mpitrain.submit(function, scheduler=scheduler, tasks_per_node=2, run_dir=tmp_path / "run", **options)

    submitted = submit(pause=0.02, train_steps=5_000)
    assert submitted.status.state in ("submitted", "running")
    wait_until(lambda: submitted.status.state != "submitted" and submitted.metrics, lambda: submitted.status)
    mpitrain.Run(tmp_path / "run").stop()
    assert submitted.wait(60).state == "stopped"
    assert "2 workers on 1 node" in capsys.readouterr().out
    step = submitted.status.step
    assert submitted.model().step == step > 0
    resumed = submit(train_steps=step + 10)
    assert resumed.wait(60).state == "finished"
    assert f"step {step + 10}" in capsys.readouterr().out
