"""A strategy in a user's module, selected by ``--mode module:Class``."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mpitrain import checkpoint

from ..support.launch import ROOT, Mpi
from ..support.world.controller import World

PAGE = (ROOT / "docs" / "modes.md").read_text(encoding="utf-8")
(STRATEGY,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def train(world: World, folder: Path, steps: int, *flags: str) -> dict[str, np.ndarray]:
    """Train on two ranks; return the parameters in the last checkpoint."""
    words = [ROOT / "jobs" / "mnist_mlp.py", "--run-dir", folder, "--train-steps", str(steps), *flags]
    world.train(2, *words, env={"PYTHONPATH": f"{ROOT}:{folder.parent}"})
    with checkpoint.Checkpoint(checkpoint.path_for(folder / "checkpoints", steps)) as file:
        return {name: file.read(name) for name in file.datasets if name.startswith("params/")}


def test_a_strategy_of_a_user(world: World, tmp_path: Path) -> None:
    """Two steps with half the batch are one step of ``sync``; a resumed run gives the same bits."""
    (tmp_path / "own_strategy.py").write_text(STRATEGY)
    mode = ("--mode", "own_strategy:EverySecondStep", "--batch-size", "50")
    expected = train(world, tmp_path / "sync", 10, "--batch-size", "100")
    found = train(world, tmp_path / "own", 20, *mode, "--save-steps", "4")
    assert expected.keys() == found.keys() and expected
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-5, err_msg=name)
    assert sorted(checkpoint.steps(tmp_path / "own" / "checkpoints")) == [4, 8, 12, 16, 20]
    train(world, tmp_path / "resumed", 8, *mode)
    resumed = train(world, tmp_path / "resumed", 20, *mode)
    assert all(resumed[name].tobytes() == array.tobytes() for name, array in found.items())


@pytest.mark.quick
@pytest.mark.parametrize("mode", ["no_such_module:Class", "json:NoSuchClass"])
def test_a_mode_that_does_not_exist_is_one_line(world: World, tmp_path: Path, mode: str) -> None:
    assert mode in world.refusal(2, ROOT / "jobs" / "mnist_mlp.py", "--run-dir", tmp_path, "--mode", mode)


@pytest.mark.parametrize("flags", [("--nan", "skip"), ("--train-steps", "7")], ids=str)
def test_the_options_of_a_run_apply_to_a_strategy_of_a_user(
    world: World, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    (tmp_path / "own_strategy.py").write_text(STRATEGY)
    job = ROOT / "tests" / "support" / "jobs" / "diverging.py" if "--nan" in flags else ROOT / "jobs" / "mnist_mlp.py"
    words = [job, "--run-dir", tmp_path / "run", "--mode", "own_strategy:EverySecondStep", *flags]
    world.train(2, *words, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    (step,) = checkpoint.steps(tmp_path / "run" / "checkpoints")
    assert step == 7 or "--nan" in flags
    with checkpoint.Checkpoint(checkpoint.path_for(tmp_path / "run" / "checkpoints", step)) as file:
        assert all(np.isfinite(file.read(name)).all() for name in file.datasets)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("source", "missing"),
    [
        (STRATEGY.replace("def finish", "def finishes"), "finish"),
        (STRATEGY.replace("def vector", "def vectors"), "vector"),
        (STRATEGY.replace("def close", "def clos"), "close"),
        ("EverySecondStep = 3", "class"),
        ("class EverySecondStep:\n    pass", "mpitrain.strategy.base.Strategy"),
        (STRATEGY.replace("bulk_synchronous import BulkSynchronous", "sync import Sync as BulkSynchronous"), "finish"),
        (STRATEGY.replace("devices, state)", "devices, initial_state)"), "initial_state"),
        ("class EverySecondStep(", "SyntaxError"),
    ],
    ids=["finish", "vector", "close", "no class", "no strategy", "finish of sync", "former constructor", "syntax"],
)
def test_an_incomplete_strategy_is_refused(world: World, tmp_path: Path, source: str, missing: str) -> None:
    (tmp_path / "own_strategy.py").write_text(source)
    words = [ROOT / "jobs" / "mnist_mlp.py", "--run-dir", tmp_path / "run", "--mode", "own_strategy:EverySecondStep"]
    assert missing in world.refusal(2, *words, env={"PYTHONPATH": str(tmp_path)})


@pytest.mark.parametrize("vectors", ["None", "{}"])
def test_a_strategy_without_the_vectors_of_the_plan_is_refused(world: World, tmp_path: Path, vectors: str) -> None:
    source = STRATEGY.replace("self.initial_vectors = self.vectors", f"self.initial_vectors = {vectors}")
    test_an_incomplete_strategy_is_refused(world, tmp_path, source, "initial_vectors")


@pytest.mark.quick
@pytest.mark.parametrize(
    "flags", [("--mode", "async"), ("--mode", "local", "--local-steps", "2", "--elastic-rho", "0.3")], ids=" ".join
)
def test_snapshots_include_the_extra_state_of_a_subclass(openmpi: Mpi, tmp_path: Path, flags: tuple[str, ...]) -> None:
    job = tmp_path / "own.py"
    lines = [
        "from mpitrain.core.extra_state import Versioned",
        "from mpitrain.strategy import local",
        "from mpitrain.strategy.ps import asynchronous",
        "for strategy in (local.Local, asynchronous.Async):",
        "    strategy.extra_state = lambda self: {'own': Versioned(3, {'step': float(self.progress.step)})}",
    ]
    job.write_text("\n".join([(ROOT / "jobs" / "mnist_mlp.py").read_text(), *lines, ""]))
    openmpi.train(2, job, "--run-dir", tmp_path / "run", "--train-steps", "4", *flags)
    with checkpoint.Checkpoint(checkpoint.path_for(tmp_path / "run" / "checkpoints", 4)) as file:
        assert file.attributes["run/state/own"] == {"version": 3, "step": 4.0}
