"""Synchronous training: n ranks give the result of one rank with the global batch; repeated runs give the same bits."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from mpitrain.plan.plan import Plan
from mpitrain.plan.progress import Share

from ..support.launch import JOBS, ROOT
from ..support.results import SMALL, assert_close, assert_same_bits, final, train
from ..support.world import calls
from ..support.world.controller import World


@pytest.mark.quick
@pytest.mark.parametrize("n", [2, 3, 4])
def test_n_ranks_agree_with_one_in_float64(each_world: World, n: int, alone, tmp_path: Path) -> None:
    flags = ("--dtype", "float64")
    assert_close(train(each_world, n, tmp_path, *flags), alone(*flags), 1e-12)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_n_ranks_agree_with_one_in_float32(world: World, n: int, alone, tmp_path: Path) -> None:
    flags = ("--optimizer", "momentum")  # Adam may divide by pure rounding errors
    assert_close(train(world, n, tmp_path, *flags), alone(*flags), 1e-5)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (["--bucket-bytes", "0"], []),
        (["--no-shared-memory"], []),
        (["--no-shared-memory", "--bucket-bytes", "0"], []),
        # Without BatchNorm, parameters arrive while the next step computes.
        (["--no-shared-memory", "--bucket-bytes", "0"], ["--no-normalize"]),
        (["--no-shared-memory", "--bucket-bytes", "0", "--validate-steps", "7"], ["--no-normalize"]),
        # Without BatchNorm, whose statistics would be those of the micro-batches.
        (["--accumulate-steps", "3"], ["--no-normalize"]),
        (["--devices-per-rank", "3"], []),  # 4 examples per rank; BatchNorm over all workers and devices
        (["--devices-per-rank", "2", "--accumulate-steps", "2", "--no-shared-memory"], ["--no-normalize"]),
        ([], ["--clip-norm", "0.5"]),
        (["--bucket-bytes", "0"], ["--optimizer", "lamb"]),
        (["--no-shared-memory"], ["--optimizer", "lars"]),
    ],
    ids=str,
)
def test_every_way_to_average_gives_the_same(
    world: World, how: list[str], what: list[str], alone, tmp_path: Path
) -> None:
    what = [*what, "--dtype", "float64"]
    assert_close(train(world, 3, tmp_path, *how, *what), alone(*what), 1e-12)


_UNEQUAL_SHARES = [
    Share(0, 1, (4, 1), ((0, 1),)),
    Share(5, 1, (1,), ((0,),)),
    Share(6, 1, (3, 3), ((0, 1),)),
]  # of the 12 examples of a step


def _train_unequally(*words: str) -> None:
    with mock.patch.object(Plan, "share_of", lambda plan, worker: _UNEQUAL_SHARES[worker]):
        done = calls.train(words, calls.Place(str(ROOT), {}))
    assert done.returncode == 0


@pytest.mark.parametrize("how", [[], ["--bucket-bytes", "0"], ["--no-shared-memory", "--bucket-bytes", "0"]], ids=str)
def test_workers_may_have_different_numbers_of_micro_batches(
    world: World, how: list[str], alone, tmp_path: Path
) -> None:
    """The job has no BatchNorm, whose statistics would be those of the micro-batches."""
    what = ["--no-normalize", "--dtype", "float64"]
    world.call(3, _train_unequally, str(SMALL), *how, *what, "--batch-size", "4", "--run-dir", str(tmp_path))
    assert_close(final(tmp_path), alone(*what), 1e-12)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("openmpi", ()),
        ("openmpi", ("--no-shared-memory",)),
        ("openmpi", ("--no-shared-memory", "--bucket-bytes", "0", "--no-normalize")),
        ("openmpi", ("--bucket-bytes", "0")),
        ("mpich", ("--no-shared-memory",)),
    ],
)
def test_a_run_twice_is_the_same_bits(
    request: pytest.FixtureRequest, name: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    each_world: World = request.getfixturevalue(name)
    assert_same_bits(train(each_world, 3, tmp_path / "a", *flags), train(each_world, 3, tmp_path / "b", *flags))


@pytest.mark.quick
def test_resuming_is_never_having_stopped(world: World, tmp_path: Path) -> None:
    whole = train(world, 2, tmp_path / "whole")
    train(world, 2, tmp_path / "parts", "--train-steps", "37")
    assert_same_bits(train(world, 2, tmp_path / "parts"), whole)


@pytest.mark.quick
def test_resuming_on_other_ranks_continues_where_the_data_was(world: World, alone, tmp_path: Path) -> None:
    flags = ("--dtype", "float64")
    train(world, 2, tmp_path, *flags, "--train-steps", "37")
    assert_close(train(world, 3, tmp_path, *flags), alone(*flags), 1e-12)


@pytest.mark.quick
# Batches that do not divide an epoch, but end with the third epoch.
@pytest.mark.parametrize(("n", "batch"), [(1, 1), (1, 45), (2, 18), (3, 12), (4, 9)])
def test_an_epoch_is_each_example_once(world: World, n: int, batch: int, tmp_path: Path) -> None:
    steps = 3 * 60 // (n * batch)
    flags = ["--batch-size", str(batch), "--train-steps", str(steps), "--run-dir", tmp_path]
    world.train(n, JOBS / "recording.py", *flags)
