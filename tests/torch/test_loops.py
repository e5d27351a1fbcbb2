"""Loops that use and change gradients, options and schedules compute on several ranks what PyTorch computes."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mpitrain.data.permutation import order

from ..support.launch import Mpi, run
from ..support.world.controller import World
from . import counted_steps
from .loops import LOOPS, PAIRS, plain

plain = functools.cache(plain)  # several tests compare with the same loop
SCRIPT = Path(__file__).parent / "loops.py"


def train(world: World, n: int, *words: object, launch: tuple[object, ...] = ()) -> dict[str, list[np.ndarray]]:
    """Run the script on ``n`` ranks; return the parameters by loop."""
    world.train(n, *map(str, launch), SCRIPT, *map(str, words), timeout=240)
    return stored(words)


def restarted(mpi: Mpi, n: int, *words: object, launch: tuple[object, ...] = ()) -> dict[str, list[np.ndarray]]:
    """Run the script on ``n`` ranks, which may restart once; return the parameters by loop."""
    command = [str(mpi.python), "-m", "mpitrain", "run", "-n", str(n), "--max-restarts", "1", *map(str, launch)]
    done = run([*command, str(SCRIPT), *map(str, words)], timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return stored(words)


def stored(words: tuple[object, ...]) -> dict[str, list[np.ndarray]]:
    folder = next(word for word in words if isinstance(word, Path))
    return {path.stem: [*np.load(path).values()] for path in folder.glob("*.npz")}


def assert_plain(name: str, trained: list[np.ndarray]) -> None:
    for ours, expected in zip(trained, plain(name), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-11, err_msg=name)


OWN = tuple(name for name in LOOPS if name not in PAIRS)
SOME = ("clip", "one cycle", "adafactor", "row norm", "restored adam", "adversarial", "alternating", "by hand")


@pytest.mark.parametrize(
    ("n", "mode", "flags", "names"),
    [
        (1, "local", (), SOME),
        (2, "sync", (), SOME),
        (3, "sync", (), OWN),
        (3, "sync", ("--no-shared-memory",), OWN),
        (1, "sync", (), tuple(PAIRS)),
        (2, "sync", (), tuple(PAIRS)),
        (3, "local", ("--mode", "local", "--local-steps", 1), ("SGD with polynomial",)),
    ],
)
def test_loops_train_as_in_plain_torch(
    world: World, n: int, mode: str, flags: tuple[str, ...], names: tuple[str, ...], tmp_path: Path
) -> None:
    trained = train(world, n, tmp_path, *names, "--mode", mode, launch=flags)
    assert set(trained) == set(names)
    for name, parameters in trained.items():
        assert_plain(name, parameters)


def test_gradients_of_parts_of_a_batch_are_added_up(world: World, tmp_path: Path) -> None:
    """The loop runs for each part, but zeroes, clips and changes gradients of whole batches only."""
    names = ("clip", "muon", "together", "used", "gradient penalty")
    trained = train(world, 2, tmp_path, *names, "--accumulate-steps", 3)
    for name in names:
        assert_plain(name, trained[name])


@pytest.mark.parametrize("name", ["alternating", "one cycle"])
def test_a_killed_loop_resumes_with_its_schedule(openmpi: Mpi, name: str, tmp_path: Path) -> None:
    trained = restarted(openmpi, 2, tmp_path, name, "--kill-at", 6)
    assert (tmp_path / "killed").exists()
    assert_plain(name, trained[name])


def resumed(world: World, n: int, folder: Path, name: str, launch: tuple[object, ...] = ()) -> list[np.ndarray]:
    """Run a loop that fails on ``n`` ranks, and again on two ranks; return the parameters."""
    assert "all ranks fail" in world.refusal(n, *map(str, launch), SCRIPT, folder, name, "--fail-at", "6")
    trained = train(world, 2, folder, name, launch=launch)[name]
    records = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in records if "resumed" in record] == [4]
    return trained


@pytest.mark.parametrize("name", ["accumulate", "plateau", "adafactor", "counting", "used"])
def test_a_loop_that_fails_resumes_with_its_schedule(world: World, name: str, tmp_path: Path) -> None:
    assert_plain(name, resumed(world, 2, tmp_path, name))


@pytest.mark.parametrize("name", ["row norm", "muon and adamw"])
def test_state_of_whole_tensors_is_resumed_on_other_ranks(world: World, name: str, tmp_path: Path) -> None:
    assert_plain(name, resumed(world, 3, tmp_path, name))


def test_state_of_whole_tensors_is_averaged_and_resumed(world: World, tmp_path: Path) -> None:
    launch = ("--mode", "local", "--local-steps", 2)
    for name in ("whole", "failed"):
        (tmp_path / name).mkdir()
    whole = train(world, 2, tmp_path / "whole", "row norm", launch=launch)["row norm"]
    for uninterrupted, again in zip(
        whole, resumed(world, 2, tmp_path / "failed", "row norm", launch=launch), strict=True
    ):
        np.testing.assert_array_equal(uninterrupted, again)


@pytest.mark.parametrize("mode", ["async", "backup"])
def test_rates_reach_the_server(world: World, mode: str, tmp_path: Path) -> None:
    for folder, flags in (("shared", ()), ("messages", ("--no-shared-memory",))):
        (out := tmp_path / folder).mkdir()
        trained = train(world, 2, out, "server rates", launch=("--mode", mode, "--ps", 1, *flags))
        assert_plain("server rates", trained["server rates"])


def test_a_killed_loop_over_steps_resumes_at_its_step(openmpi: Mpi, tmp_path: Path) -> None:
    launch = ["-n", "2", "--run-dir", tmp_path / "run", "--max-restarts", "1", "--save-steps", "4"]
    words = ["run", *launch, Path(counted_steps.__file__), tmp_path, "--kill-at", "6"]
    done = run([str(openmpi.python), "-m", "mpitrain", *map(str, words)], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    model, dataset = counted_steps.make()
    rule, total = torch.optim.SGD(model.parameters(), 0.01), counted_steps.TOTAL
    for step in range(counted_steps.STEPS):
        inputs, labels = dataset[order(step * total, total, len(dataset), 0, None)]
        rule.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        rule.step()
    with torch.serialization.safe_globals([torch.nn.Sequential, torch.nn.Linear]):
        saved = torch.load(tmp_path / "model.pt", weights_only=True)
    for ours, expected in zip(saved.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_state_of_the_script_is_restored(openmpi: Mpi, world: World, tmp_path: Path) -> None:
    script, flags = Path(__file__).parent / "own_state.py", ("--save-steps", "4", "--log-steps", "4")
    begun = world.train(2, "--run-dir", tmp_path / "whole", *flags, script, tmp_path / "whole.npz")
    launch = ["run", "-n", "2", "--run-dir", tmp_path / "killed", "--max-restarts", "1", *flags]
    words = [*launch, script, tmp_path / "killed.npz", "--kill-at", "7"]
    done = run([str(openmpi.python), "-m", "mpitrain", *map(str, words)], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for output in (begun.stdout, done.stdout):
        assert "steps" in output and "examples" not in output
    whole, killed = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    for name, values in whole.items():
        np.testing.assert_array_equal(values, killed[name], err_msg=name)
