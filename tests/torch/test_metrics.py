"""Metrics of PyTorch modules equal those of scikit-learn on the whole validation set, for any number of workers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import mpitrain
from mpitrain import checkpoint
from mpitrain.monitor import heartbeat

from ..support.launch import Mpi, one_line, run
from ..support.world.controller import World
from . import measured

FILE = Path(measured.__file__)
SCRIPT = FILE.with_name("measured_loop.py")
TOTAL = 12  # examples of a step


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def assert_same_metrics(values: dict[str, float], expected: dict[str, float], prefix: str = "") -> None:
    """Compare metrics of both libraries in a run with the values that scikit-learn computes here."""
    for auc, f1 in (("sklearn_auc", "sklearn_f1"), ("auc", "many_f1")):
        assert values[prefix + auc] == pytest.approx(expected["auc"], abs=1e-6)
        assert values[prefix + f1] == pytest.approx(expected["f1"], abs=1e-6)


@pytest.mark.parametrize(("n", "flags"), [(1, ()), (2, ("--dataset",)), (3, ("--accumulate-steps", "2")), (4, ())])
def test_metrics_of_a_job(world: World, n: int, flags: tuple[str, ...], tmp_path: Path) -> None:
    words = ("--dtype", "float64", "--batch-size", str(TOTAL // n), "--run-dir", tmp_path)
    world.train(n, FILE, *words, *flags, timeout=120)
    recorded = next(line for line in lines(tmp_path) if "validation_auc" in line)
    inputs, labels = measured.splits()[1].tensors
    with torch.no_grad():
        outputs = mpitrain.load(tmp_path, model=measured.make_model())(inputs)
    assert_same_metrics(recorded, measured.of_sklearn(outputs, labels), "validation_")
    assert recorded["validation_many_accuracy"] == pytest.approx(recorded["validation_accuracy"], abs=1e-6)


def start(world: World, n: int, run_dir: Path, *words: str, flags: tuple[str, ...] = ()) -> str:
    """Run the loop on ``n`` ranks; return what they print."""
    return world.train(n, "--run-dir", run_dir, *flags, SCRIPT, *words, timeout=120).stdout


def launched(mpi: Mpi, run_dir: Path, *words: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the loop on two ranks that ``mpitrain run`` starts."""
    command = [mpi.python, "-m", "mpitrain", "run", "-n", 2, "--run-dir", run_dir, *flags, SCRIPT, *words]
    return run([*map(str, command)], timeout=120)


def results_of(output: str) -> list[dict[str, Any]]:
    """Return the results of the workers by rank."""
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"values"')]


@pytest.mark.parametrize(
    ("n", "flags"), [(1, ()), (4, ()), (2, ("--mode", "local")), (3, ("--mode", "async", "--ps", "1"))]
)
def test_metrics_of_a_loop(world: World, n: int, flags: tuple[str, ...], tmp_path: Path) -> None:
    printed = results_of(start(world, n, tmp_path, flags=flags))
    assert printed
    for result in printed:
        assert not any(result["stopping"])
        assert_same_metrics(result["values"][-1], result["expected"])
        assert result["values"][-1] == pytest.approx(printed[0]["values"][-1], abs=1e-6)
    recorded = [line for line in lines(tmp_path) if "validation_auc" in line]
    measured_by_chief = [{f"validation_{name}": value for name, value in v.items()} for v in printed[0]["values"][:-1]]
    assert [{k: v for k, v in line.items() if k not in ("step", "time_s")} for line in recorded] == [
        pytest.approx(values, abs=1e-6) for values in measured_by_chief
    ]
    assert [line["epoch"] for line in lines(tmp_path) if "half" in line] == [*range(len(recorded))]
    if "--mode" not in flags:
        assert len(printed) == n and len(recorded) == 3
        assert printed[0]["values"] == [pytest.approx(values) for values in printed[-1]["values"]]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("shares", ["DataLoader", "all validation examples"]),
        ("shuffle", ["RandomSampler"]),
        ("middle", ["trainer.evaluate", "step"]),
    ],
)
def test_wrong_calls_are_one_line(world: World, wrong: str, words: list[str], tmp_path: Path) -> None:
    message = world.refusal(2, "--run-dir", tmp_path, SCRIPT, "--wrong", wrong)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("has_group", [False, True])
def test_helpers_that_ask_torch_distributed(openmpi: Mpi, has_group: bool, tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text(
        "import torch.distributed as dist\n"
        "def is_dist_avail_and_initialized():\n    return dist.is_available() and dist.is_initialized()\n"
        "def is_main_process():\n    return not is_dist_avail_and_initialized() or dist.get_rank() == 0\n"
    )
    start = 'utils.dist.init_process_group("mpitrain", init_method="mpitrain://")\n' if has_group else ""
    (tmp_path / "train.py").write_text(
        f"import torch, utils, mpitrain\n{start}model = torch.nn.Linear(2, 1)\n"
        "trainer = mpitrain.Trainer(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "loader = trainer.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), 4)\n"
        "for epoch in trainer.epochs(1):\n    for (inputs,) in loader:\n"
        "        trainer.backward(model(inputs).sum())\n        trainer.step()\n"
        "if utils.is_main_process():\n    print('the main process')\n"
    )
    words = [str(openmpi.python), "-m", "mpitrain", "run", "-n", "2", "--run-dir", str(tmp_path / "run")]
    done = run([*words, str(tmp_path / "train.py")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the main process") == (1 if has_group else 2)
    assert done.stderr.count("is_main_process") == (0 if has_group else 1)


@pytest.mark.parametrize(("wrong", "words"), [("name", ["'loss'"]), ("entries", ["image", "collate_fn"])])
def test_an_error_of_one_rank_is_one_line(openmpi: Mpi, wrong: str, words: list[str], tmp_path: Path) -> None:
    done = launched(openmpi, tmp_path, "--wrong", wrong)
    assert done.returncode == 2
    message = one_line(done.stderr)
    assert all(word in message for word in words), message


def test_the_summary_names_the_step_of_the_validation(world: World, tmp_path: Path) -> None:
    """A script that stops may leave out the validation of the last, incomplete epoch."""
    output = start(world, 2, tmp_path, "--wrong", "stop")
    (recorded,) = [line["step"] for line in lines(tmp_path) if "validation_loss" in line]
    (summary,) = [line for line in output.splitlines() if line.startswith("at step ")]
    status = heartbeat.read(tmp_path)
    assert status is not None and status.step > recorded
    assert summary.startswith(f"at step {recorded}:")


def test_a_loop_stops_and_keeps_its_best_checkpoint(openmpi: Mpi, tmp_path: Path) -> None:
    goal = ("--stop-metric", "loss:max", "--patience", "1", "--keep-best", "--keep", "1")  # the first loss is highest
    done = launched(openmpi, tmp_path, flags=goal)
    assert done.returncode == 0, done.stdout + done.stderr
    output = done.stdout.replace("rank 1: ", "")
    assert [result["stopping"] for result in results_of(output)] == 2 * [[False, False, True]]
    status, best = heartbeat.read(tmp_path), checkpoint.best(tmp_path / "checkpoints")
    first = next(line for line in lines(tmp_path) if "validation_loss" in line)
    assert best is not None and best[:3] == (first["step"], "loss", first["validation_loss"])
    assert status is not None and (status.state, status.step) == ("finished early", 2 * first["step"] + 1)
    assert set(checkpoint.steps(tmp_path / "checkpoints")) == {best.step, status.step}
    inputs, labels = measured.splits()[1].tensors
    with torch.no_grad():
        outputs = mpitrain.load(tmp_path / "best", model=measured.make_model())(inputs)
    assert float(torch.nn.functional.cross_entropy(outputs, labels)) == pytest.approx(best.value, abs=1e-9)
