"""Metrics of a job, early stopping by one of them, and the best checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from mpitrain import Run, checkpoint
from mpitrain.monitor import heartbeat

from ..support.launch import JOBS, Mpi, one_line, run
from ..support.world.controller import World

JOB = JOBS / "measured.py"
STOPPING = ("--stop-metric", "far:min", "--patience", "3", "--validate-steps", "3")
SERVER = ("--mode", "async", "--ps", "1", "--ps-placement", "first")


def start(mpi: Mpi, n: int, folder: Path, *flags: str, crash_at: int = -1) -> CompletedProcess[str]:
    words = [str(mpi.python), "-m", "mpitrain", "run", "-n", str(n), str(JOB), "--run-dir", str(folder), *flags]
    return run(words, timeout=80, env={"CRASH_AT": str(crash_at)})


def train(world: World, n: int, folder: Path, *flags: str) -> list[dict[str, Any]]:
    """Train; return the lines of ``metrics.jsonl`` that have validation metrics."""
    world.train(n, JOB, "--run-dir", folder, *flags)
    return validations(folder)


def validations(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "time_s"} for line in lines if "validation_far" in line]


@pytest.mark.quick
def test_metrics_are_those_of_all_examples_in_their_order(openmpi: Mpi, world: World, tmp_path: Path) -> None:
    lines = {n: train(world, n, tmp_path / str(n), "--batch-size", str(12 // n))[-1] for n in (1, 4)}
    for line in lines.values():
        assert line["validation_count"] == 11 and line["validation_order"] == 1.0
        mean = (6 * line["validation_parts_low"] + 5 * line["validation_parts_high"]) / 11
        assert line["validation_far"] == pytest.approx(abs(mean - 5), rel=1e-5)
    assert lines[4] == pytest.approx(lines[1], rel=1e-5)
    words = [str(openmpi.python), "-m", "mpitrain", "evaluate", str(tmp_path / "4"), "--json"]
    assert json.loads(run(words).stdout) == pytest.approx(lines[4], rel=1e-5)


def test_metrics_of_gpus(gpu_world: World, tmp_path: Path) -> None:
    last = {
        device: train(gpu_world, 2, tmp_path / device, "--batch-size", "6", "--device", device)[-1]
        for device in ("cpu", "gpu")
    }
    assert last["gpu"] == pytest.approx(last["cpu"], rel=1e-5)


def test_fewer_examples_than_workers(world: World, tmp_path: Path) -> None:
    assert train(world, 3, tmp_path, "--n-validation", "2")[-1]["validation_count"] == 2


@pytest.mark.parametrize("flags", [(), SERVER], ids=["sync", "async"])
def test_a_metric_that_fails_is_named_with_its_line(openmpi: Mpi, flags: tuple[str, ...], tmp_path: Path) -> None:
    line = JOB.read_text().splitlines().index("    return outputs[:, 1]") + 1
    for bad, words in (("fails", ["'fails'", f"{JOB}, line {line}"]), ("array", ["'array'", "(11, 1)"])):
        done = start(openmpi, 2, tmp_path / bad, "--bad", bad, "--train-steps", "3", *flags)
        assert done.returncode == 2
        assert all(word in one_line(done.stderr) for word in words), done.stderr


@pytest.mark.parametrize(
    ("n", "flags"), [(3, ()), (2, ("--mode", "local", "--local-steps", "3")), (3, SERVER)], ids=["sync", "local", "ps"]
)
def test_training_stops_and_the_best_checkpoint_stays(
    openmpi: Mpi, world: World, n: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    keep = ("--keep-best", "--save-steps", "2", "--keep", "1")
    lines = train(world, n, tmp_path, *STOPPING, *keep, "--train-steps", "500", *flags)
    status = heartbeat.read(tmp_path)
    assert status is not None and status.state == "finished early" and status.step < 500
    best = min(lines, key=lambda line: line["validation_far"])
    worse = [line for line in lines if line["step"] > best["step"]]
    assert 3 <= len(worse) <= 4, "the last validation may be another one"
    folder = tmp_path / "checkpoints"
    record = checkpoint.best(folder)
    assert record is not None and record[:3] == (best["step"], "far", best["validation_far"])
    assert set(checkpoint.steps(folder)) == {best["step"], status.step}
    evaluated = run([str(openmpi.python), "-m", "mpitrain", "evaluate", str(tmp_path / "best"), "--json"])
    assert json.loads(evaluated.stdout)["validation_far"] == pytest.approx(best["validation_far"], abs=1e-5)
    assert Run(tmp_path).model(best=True).step == best["step"]  # type: ignore[union-attr]


@pytest.mark.parametrize("n", [1, 2])
def test_a_killed_run_stops_at_the_same_step(openmpi: Mpi, world: World, n: int, tmp_path: Path) -> None:
    flags = (*STOPPING, "--keep-best", "--save-steps", "4", "--batch-size", str(12 // n))
    whole = train(world, n, tmp_path / "whole", *flags)
    best = checkpoint.best(tmp_path / "whole" / "checkpoints")
    assert best is not None
    for crash_at in (best.step + 2, best.step + 8):
        assert start(openmpi, n, tmp_path / "killed", *flags, crash_at=crash_at).returncode == 1
    assert train(world, n, tmp_path / "killed", *flags)[-1] == whole[-1]
    ends = [heartbeat.read(tmp_path / name) for name in ("whole", "killed")]
    assert ends[0] is not None and ends[1] is not None and "far" in ends[0].reason
    assert (ends[0].step, ends[0].reason) == (ends[1].step, ends[1].reason)
    assert checkpoint.best(tmp_path / "killed" / "checkpoints") == best


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["near:max"], ["near:max", "loss, accuracy, far, parts, count, order"]),
        (["parts_mid:max", "--train-steps", "3"], ["parts_mid", "parts_low"]),
        (["accuracy", "--train-steps", "3", *SERVER], ["accuracy", "far"]),
    ],
)
def test_a_stop_metric_that_is_not_measured(openmpi: Mpi, flags: list[str], words: list[str], tmp_path: Path) -> None:
    done = start(openmpi, 2, tmp_path, "--keep-best", "--stop-metric", *flags)
    assert done.returncode == 2
    assert all(word in one_line(done.stderr) for word in words), done.stderr
