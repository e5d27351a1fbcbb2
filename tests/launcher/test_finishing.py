"""The content of a run directory after runs that were refused, changed, or finished early by a hook."""

from __future__ import annotations

import json
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import mpitrain
from mpitrain.core.toml import read_toml
from mpitrain.monitor import heartbeat

from ..support.launch import JOBS, Mpi, one_line, run
from ..support.world.controller import World

JOB = JOBS / "finishing.py"


def start(mpi: Mpi, folder: Path, *flags: str) -> CompletedProcess[str]:
    words = [str(mpi.python), "-m", "mpitrain", "run", "-n", "2", str(JOB), "--run-dir", str(folder)]
    return run([*words, *flags], timeout=80)


def train(world: World, folder: Path, *flags: str | Path) -> str:
    return world.train(2, JOB, "--run-dir", folder, *flags).stdout


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_a_refused_command_changes_no_file(openmpi: Mpi, world: World, tmp_path: Path) -> None:
    train(world, tmp_path)
    before = files_of(tmp_path)
    for flags in (["--seed", "5"], ["--resume", str(tmp_path / "none.h5")]):
        world.refusal(2, JOB, "--run-dir", tmp_path, *flags)
        assert files_of(tmp_path) == before, flags
    refused = start(openmpi, tmp_path, "--hidden-units", "16")
    assert refused.returncode == 2 and one_line(refused.stderr)
    assert files_of(tmp_path) == before


def test_a_finished_run_is_validated_again_without_a_change(openmpi: Mpi, world: World, tmp_path: Path) -> None:
    train(world, tmp_path)
    before = files_of(tmp_path)
    again = start(openmpi, tmp_path, "--log-steps", "1")
    assert again.returncode == 0 and "validation loss" in again.stdout
    assert files_of(tmp_path) == before


def test_changed_options_are_reported_and_kept(world: World, tmp_path: Path) -> None:
    train(world, tmp_path, "--train-steps", "20")
    changed = train(world, tmp_path, "--train-steps", "40", "--learning-rate", "0.02")
    reported = [line.partition("--")[2] for line in changed.splitlines() if " -> " in line]
    assert reported == ["train-steps: 20 -> 40", "learning-rate: 0.01 -> 0.02"]
    assert sorted(path.name for path in (tmp_path / "history").iterdir()) == ["0001-step-0", "0002-step-20"]


IN_EPOCHS = """
import numpy as np
from mpitrain import Job, data, nn, optim

def job() -> Job:
    rng = np.random.default_rng(0)
    return Job(
        model=nn.Sequential(nn.Dense(8, 3)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.sgd(optim.by_epoch(optim.polynomial(0.1, 4))),
        train=data.from_arrays(rng.standard_normal((600, 8)).astype("f4"), rng.integers(0, 3, 600)),
        batch_size=10,
    )
"""


@pytest.mark.parametrize("flags", [("--mode", "sync"), ("--mode", "async", "--ps", "1")], ids=["sync", "async"])
def test_epochs_and_their_schedules_continue_on_another_number_of_ranks(
    world: World, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """The steps of two ranks have 20 examples, the later ones 10."""
    job, folder, config = tmp_path / "job.py", tmp_path / "run", tmp_path / "config.toml"
    job.write_text(IN_EPOCHS)
    config.write_text("[run]\ntrain_steps = 5\nlog_steps = 1\n")  # flags override it
    for n, options, epochs, steps in ((2, (), "2", 60), (1 if "sync" in flags else 3, flags, "4", 180)):
        world.train(n, job, "--run-dir", folder, "--config", config, *options, "--train-epochs", epochs)
        status = heartbeat.read(folder)
        assert status is not None and (status.step, status.train_steps) == (steps, steps)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["learning_rate"] for line in lines if "learning_rate" in line}
    epochs_at = {step: step / 30 if step <= 60 else 2 + (step - 60) / 60 for step in rates}
    assert {1, 60, 180} <= epochs_at.keys()
    assert rates == pytest.approx({step: 0.1 * (1 - epoch / 4) for step, epoch in epochs_at.items()}, abs=2e-3)
    assert read_toml(folder / "config.toml")["run"]["train_epochs"] == 4
    assert mpitrain.load(folder).step == 180


def test_steps_that_are_lost_are_reported(openmpi: Mpi, world: World, tmp_path: Path) -> None:
    """A run that died before its first checkpoint starts again at the first step, and prints one notice."""
    words = [JOBS / "hanging.py", "--run-dir", tmp_path, "--kind"]
    launch = [str(openmpi.python), "-m", "mpitrain", "run", "-n", "2"]
    died = run([*launch, *map(str, words), "exit", "--at", "40", "--log-steps", "20"])
    assert died.returncode == 1 and " or later" not in died.stdout
    assert re.search("step [24]0 or later", world.train(2, *words, "none", "--train-steps", "20").stdout)
    assert " or later" not in world.train(2, *words, "none", "--train-steps", "30").stdout


@pytest.mark.parametrize(
    "flags", [(), ("--mode", "async", "--ps", "1", "--ps-placement", "first")], ids=["sync", "async"]
)
def test_a_run_that_a_hook_finishes_early(openmpi: Mpi, world: World, flags: tuple[str, ...], tmp_path: Path) -> None:
    train(world, tmp_path, "--limit", "10", *flags)
    status = heartbeat.read(tmp_path)
    assert status is not None and (status.state, status.reason) == ("finished early", "seen 10 steps")
    before = files_of(tmp_path)
    assert start(openmpi, tmp_path, "--limit", "10", *flags).returncode == 0
    assert files_of(tmp_path) == before, "it is not started again"

    newest = max((tmp_path / "checkpoints").iterdir())
    train(world, tmp_path, "--limit", "20", "--resume", newest, *flags)
    again = heartbeat.read(tmp_path)
    assert again is not None and again.reason == "seen 20 steps"
    assert again.step < status.step + 15, "the hook's state was restored"
