"""The ends of a run after which a batch job is requeued: the rendered scripts and ``slurm/preemptible.sbatch``, run by
bash."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest

from mpitrain.batch_systems.job import Batch
from mpitrain.batch_systems.registry import SYSTEMS
from mpitrain.batch_systems.resources import Resources

from ...support.batches import render
from ...support.launch import ROOT


@pytest.mark.parametrize(
    ("status", "signal", "comes_back"),
    [
        (0, "", False),
        (1, "", False),
        (1, "lost", True),
        (1, "lost again", False),
        (2, "", False),
        (75, "", True),
        (75, "USR1", True),
        (75, "TERM", False),
        (143, "USR1", True),
    ],
)
def test_what_brings_a_job_back(status: int, signal: str, comes_back: bool, tmp_path: Path) -> None:
    programs = {
        "python": f"trap 'exit {status}' TERM; "
        + (f"kill -{signal} $PPID; for i in {{1..90}}; do sleep 0.1; done" if signal.isupper() else ""),
        "scontrol": 'echo "$@" >>again',
        "srun": "exit 1" if "lost" in signal else "exit 0",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\nexit {status if name == 'python' else 0}\n")
        (tmp_path / name).chmod(0o755)
    made = Batch("n", Resources(), tmp_path, tmp_path / "r", str(tmp_path / "python"), ["job.py"], "mpirun")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "5"}
    environment["SLURM_RESTART_COUNT"] = "5" if "again" in signal else "1"
    text = render("slurm", made).text
    done = subprocess.run(["bash", "-c", text], env=environment, timeout=30, check=False, capture_output=True)
    assert done.returncode == status
    assert (tmp_path / "again").exists() == comes_back


@pytest.mark.parametrize(("scheduler", "signal", "resubmits"), [("flux", "USR1", True), ("flux", "HUP", False)])
def test_a_cancelled_job_is_not_resubmitted(scheduler: str, signal: str, resubmits: bool, tmp_path: Path) -> None:
    run = f"trap 'exit 75' TERM; kill -{signal} $PPID; for i in {{1..90}}; do sleep 0.1; done"
    for name, text in (("python", run), ("flux", f"echo >>{tmp_path}/again")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    made = Batch("n", Resources(), tmp_path, tmp_path / "r", str(tmp_path / "python"), ["job.py"], "mpirun")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-c", render(scheduler, made).text]
    done = subprocess.run(command, env=environment, timeout=30, check=False, capture_output=True)
    assert done.returncode == 75
    assert (tmp_path / "again").exists() == resubmits


@pytest.mark.parametrize(("started_at", "status"), [(1, 0), (3, 0), (4, 1)])
def test_srun_that_starts_no_rank_is_tried_again(started_at: int, status: int, tmp_path: Path) -> None:
    finish = f"""echo '{{"state": "finished", "step": 0}}' >{tmp_path}/r/status.json"""
    text = f"echo >>{tmp_path}/starts; [ $(wc -l <{tmp_path}/starts) -lt {started_at} ] || {finish}"
    for name, program in (("srun", text), ("sleep", ":")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{program}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "status.json").write_text('{"state": "submitted"}')
    resources = Resources(requeue=False)
    made = Batch("n", resources, tmp_path, tmp_path / "r", "python", ["job.py"], "srun", mpi="pmix")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "5"}
    command = ["bash", "-c", render("slurm", made).text]
    done = subprocess.run(command, env=environment, timeout=30, check=False, capture_output=True)
    assert done.returncode == status, done.stderr
    assert len((tmp_path / "starts").read_text().splitlines()) == min(started_at, 3)


@pytest.mark.parametrize("scheduler", ["slurm", "preemptible.sbatch"])
def test_a_run_that_ends_before_the_script_waits_again(scheduler: str, tmp_path: Path) -> None:
    run = "trap 'exit 75' TERM; kill -USR1 $PPID; for i in {1..90}; do sleep 0.1; done"
    for name, text in (("python", run), ("mpitrain", run), ("scontrol", f"echo >>{tmp_path}/again")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    made = Batch("n", Resources(), tmp_path, tmp_path / "r", str(tmp_path / "python"), ["job.py"], "mpirun")
    shipped = Path("slurm/preemptible.sbatch").resolve()
    text = shipped.read_text() if scheduler == shipped.name else render(scheduler, made).text
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "5"}
    # The run ends while the script sends the signal to it.
    environment["BASH_FUNC_kill%%"] = '() { builtin kill "$@"; local failed=$?; sleep 0.5; return $failed; }'
    (tmp_path / "runs" / "slurm-5").mkdir(parents=True)
    command = ["bash", "-c", text]
    done = subprocess.run(command, env=environment, timeout=30, check=False, capture_output=True, cwd=tmp_path)
    assert done.returncode == 75
    assert (tmp_path / "again").exists()


@pytest.mark.parametrize("scheduler", [*SYSTEMS, "preemptible.sbatch"])
def test_requeues_stop_after_three_without_a_newer_checkpoint(scheduler: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "slurm-5"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-0000000005.h5").touch()
    programs = {"python": f'[ -z "$SAVED" ] || touch "{run_dir}/checkpoints/$SAVED"; exit 75'}
    programs["mpitrain"] = programs["python"]
    programs |= dict.fromkeys(("scontrol", "qsub", "flux"), f"echo >>{tmp_path}/again")
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = ROOT / "slurm" / scheduler
    if script.exists():
        text = script.read_text()
    else:
        made = Batch("n", Resources(), tmp_path, run_dir, str(tmp_path / "python"), ["job.py"], "mpirun")  # type: ignore[arg-type]
        text = render(scheduler, made).text
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "5"}
    statuses, logged = [], []
    for saved in ("", "", "step-0000000010.h5", "", "", "", "", ""):
        environment["SAVED"] = saved
        done = subprocess.run(
            ["bash", "-c", text], cwd=tmp_path, env=environment, timeout=30, check=False, capture_output=True
        )
        statuses.append(done.returncode)
        logged.append(len(done.stderr.splitlines()))
    assert statuses == [75, 75, 75, 75, 75, 75, 1, 75]  # a job submitted again by hand is counted anew
    assert logged == [0, 0, 0, 0, 0, 0, 1, 0]
    assert scheduler == "lsf" or len((tmp_path / "again").read_text().splitlines()) == 7


def test_requeues_of_a_program_stop_after_three_that_ran_for_less_than_a_minute(tmp_path: Path) -> None:
    for name, text in (("python", "exit 75"), ("scontrol", f"echo >>{tmp_path}/again")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    words = ["--", "python", "train.py"]
    made = Batch("n", Resources(), tmp_path, tmp_path / "r", str(tmp_path / "python"), words, "mpirun")
    text = render("slurm", dataclasses.replace(made, rank_command="exec", keeps_checkpoints=False)).text
    statuses = []
    for seconds in (0, 0, 100, 0, 0, 0, 0):  # simulated duration of the script
        script = f"SECONDS={seconds}\n{text}"
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "5"}
        done = subprocess.run(["bash", "-c", script], env=environment, timeout=30, check=False, capture_output=True)
        statuses.append(done.returncode)
    assert statuses == [75, 75, 75, 75, 75, 75, 1]
    assert len((tmp_path / "again").read_text().splitlines()) == 6
