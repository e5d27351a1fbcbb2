"""Runs with virtual workers have the same bits on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ..support.results import SMALL, assert_close, assert_same_bits, final
from ..support.world.controller import World

_TIMES = ("_s", "examples_per", "goodput")


def train(world: World, n: int, run_dir: Path, *flags: str, env: dict[str, str] | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of the last checkpoint and everything that was recorded, except times."""
    words = ("--virtual-workers", "6", "--batch-size", "4", "--no-joint", "--train-steps", "30", "--log-steps", "10")
    world.train(n, SMALL, *words, "--validate-steps", "15", "--run-dir", run_dir, *flags, env=env)
    results = final(run_dir)
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        for name, value in line.items():
            if isinstance(value, float) and not any(part in name for part in _TIMES):
                results[f"{name} at step {line['step']}"] = np.float64(value)
    assert any(name.startswith("validation_loss") for name in results) and "loss at step 20" in results
    return results


@pytest.mark.quick
def test_ranks_of_one_node(each_world: World, tmp_path: Path) -> None:
    alone = train(each_world, 1, tmp_path / "1")
    for n in (2, 4, 6):
        assert_same_bits(train(each_world, n, tmp_path / str(n)), alone)


@pytest.mark.parametrize(
    "flags",
    [
        ["--bucket-bytes", "0"],
        ["--accumulate-steps", "3"],
        ["--virtual-workers", "11", "--dtype", "float64"],
        ["--clip-norm", "0.2", "--log-grad-norm"],
        ["--optimizer", "lars", "--clip-norm", "0.2"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("nodes", [[], ["--no-shared-memory"]], ids=" ".join)
def test_what_is_computed(world: World, flags: list[str], nodes: list[str], tmp_path: Path) -> None:
    alone = train(world, 1, tmp_path / "1", *flags)
    for n in (4, 5):
        assert_same_bits(train(world, n, tmp_path / str(n), *flags, *nodes), alone)


def test_resuming_on_other_ranks(world: World, tmp_path: Path) -> None:
    whole = train(world, 3, tmp_path / "whole")
    for n, steps in ((5, 8), (1, 17), (6, 24), (2, 30)):
        world.train(
            n,
            *(SMALL, "--virtual-workers", "6", "--batch-size", "4", "--no-joint", "--train-steps", str(steps)),
            *("--run-dir", tmp_path / "parts"),
        )
    parts = final(tmp_path / "parts")
    assert_same_bits(parts, {name: whole[name] for name in parts})


LOCAL = ("--mode", "local", "--local-steps", "5", "--virtual-workers", "4")
STREAMING = ("--outer-optimizer", "nesterov", "--fragments", "2", "--overlap-steps", "1")


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--outer-optimizer", "sgd", "--accumulate-steps", "3"],
        [*STREAMING],
        ["--elastic-rho", "0.3", "--optimizer", "lars", "--clip-norm", "0.2"],
        ["--virtual-workers", "7", "--dtype", "float64"],
    ],
    ids=" ".join,
)
def test_workers_that_train_apart_take_turns(world: World, flags: list[str], tmp_path: Path) -> None:
    alone = train(world, 1, tmp_path / "1", *LOCAL, *flags)
    assert_same_bits(train(world, 2, tmp_path / "2", *LOCAL, *flags), alone)
    assert_same_bits(train(world, 3, tmp_path / "3", *LOCAL, *flags, "--no-shared-memory"), alone)


@pytest.mark.parametrize("flags", [[], [*STREAMING], ["--elastic-rho", "0.3"]], ids=" ".join)
def test_turns_have_the_result_of_as_many_ranks(world: World, flags: list[str], tmp_path: Path) -> None:
    in_turn = train(world, 1, tmp_path / "1", *LOCAL, "--dtype", "float64", *flags)
    on_ranks = train(world, 4, tmp_path / "4", *LOCAL, "--dtype", "float64", *flags, "--virtual-workers", "0")
    assert_close(in_turn, on_ranks, 1e-6)  # losses are recorded with the precision of float32


def test_workers_that_train_apart_resume_on_other_ranks(world: World, tmp_path: Path) -> None:
    flags = (*LOCAL, *STREAMING, "--save-steps", "5", "--keep", "9")
    whole = train(world, 2, tmp_path / "whole", *flags)
    for n, step in ((3, 10), (1, 15)):
        checkpoint = tmp_path / "whole" / "checkpoints" / f"step-{step:010d}.h5"
        train(world, n, tmp_path / str(n), *flags, "--resume", str(checkpoint))
        parts = final(tmp_path / str(n))
        assert_same_bits(parts, {name: whole[name] for name in parts})


def test_too_little_memory_for_the_vectors_is_one_line(world: World, tmp_path: Path) -> None:
    flags = ("--no-joint", "--batch-size", "1", "--virtual-workers", "1000", "--mode", "local", "--run-dir", tmp_path)
    assert "virtual workers" in world.refusal(2, SMALL, "--hidden-units", "20000", *flags)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("n", "flags", "word"),
    [
        (3, ["--virtual-workers", "2"], "--virtual-workers"),
        (2, ["--virtual-workers", "4", "--mode", "async"], "--mode sync, local"),
        (2, ["--virtual-workers", "4", "--mode", "local", "--local-after", "5"], "--local-after"),
        (2, ["--virtual-workers", "4", "--compress", "int8"], "--compress"),
        (2, ["--virtual-workers", "4", "--exact-mean"], "--exact-mean"),
        (2, ["--virtual-workers", "4", "--joint"], "BatchNorm"),
        (2, ["--virtual-workers", "4", "--optimizer", "lamb", "--no-joint"], "lamb"),
    ],
    ids=str,
)
def test_what_depends_on_the_number_of_workers_is_refused(
    world: World, n: int, flags: list[str], word: str, tmp_path: Path
) -> None:
    assert word in world.refusal(n, SMALL, "--run-dir", tmp_path, *flags)


IN_JOB = """
from tests.support.jobs.small import job as small


def job():
    made = small(normalize=False)
    made.virtual_workers = 4
    return made
"""


def test_the_number_may_be_in_the_job(world: World, tmp_path: Path) -> None:
    job, flags = tmp_path / "in_job.py", ("--train-steps", "20", "--run-dir")
    job.write_text(IN_JOB)
    for n in (1, 3):
        world.train(n, job, *flags, tmp_path / str(n))
    assert_same_bits(final(tmp_path / "3"), final(tmp_path / "1"))
    assert "--virtual-workers is 4 with 5 workers" in world.refusal(5, job, *flags, tmp_path / "5")
    assert "virtual_workers=4" in world.refusal(2, job, "--mode", "async", *flags, tmp_path / "async")
