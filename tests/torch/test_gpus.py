"""PyTorch modules on GPUs, which a simulator of CuPy provides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ..support.world.controller import World
from . import support, test_loops, test_metrics, test_trainer, test_virtual_workers

# Loops that use the state of elementwise optimizers, or change other options than the learning rate; and optimizers
# that run torch's code on parts of the vectors, which is not ordered with the simulated streams.
ON_CPUS = (
    "accumulate",
    "plateau",
    "adversarial",
    "by hand",
    "buffer, by hand",
    "global norm",
    "rates",
    "one cycle",
    *(name for name in test_loops.OWN if name.startswith(("restored", "used"))),
)


def train(gpu_world: World, n: int, simulated: dict[str, str], *words: str | Path) -> str:
    """Train on ``n`` ranks with simulated GPUs; return what they print."""
    return gpu_world.train(n, "--device", "gpu", *words, env=simulated, timeout=240).stdout


def train_job(gpu_world: World, n: int, run_dir: Path, simulated: dict[str, str], *flags: str) -> dict[str, np.ndarray]:
    """Train the job; return the arrays of the checkpoint."""
    train(gpu_world, n, simulated, support.JOB, "--run-dir", run_dir, "--threads", "1", "--dtype", "float64", *flags)
    return support.newest(run_dir)


@pytest.mark.parametrize(
    ("n", "flags"),
    [
        (1, ()),
        (2, ("--bucket-bytes", "100")),
        (2, ("--gpu-transport", "host")),
        (1, ("--devices-per-rank", "2")),
        (1, ("--mode", "async")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_gpus_train_as_a_plain_loop_does(
    gpu_world: World, simulated: dict[str, str], n: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    stored = train_job(gpu_world, n, tmp_path, simulated, "--kind", "all", "--optimizer", "momentum", *flags)
    support.assert_close(stored, support.plain_loop("all", 4 * n, 20, torch.float64, "momentum"), 1e-9)


@pytest.mark.parametrize(
    ("n", "flags"),
    [
        (2, ("--accumulate-steps", "2", "--freeze", "--optimizer", "adamw")),
        (1, ("--devices-per-rank", "2", "--freeze", "--optimizer", "adamw")),
        (2, ("--mode", "local", "--kind", "lstm", "--optimizer", "momentum")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_gpus_agree_with_processors(
    world: World, gpu_world: World, simulated: dict[str, str], n: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    there = train_job(gpu_world, n, tmp_path / "gpu", simulated, *flags)
    here = support.train(world, n, tmp_path / "cpu", "--device", "cpu", "--dtype", "float64", *flags)
    for name, value in here.items():
        np.testing.assert_allclose(there[name], value, atol=1e-9, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    "flags",
    [
        ("--kind", "cnn", "--normalize", "own", "--dropout", "0.3", "--dataset", "tensors"),
        ("--kind", "gpt", "--optimizer", "adamw", "--clip-norm", "0.2", "--accumulate-steps", "2"),
    ],
    ids=" ".join,
)
def test_virtual_workers_have_the_same_bits_on_any_number_of_gpus(
    gpu_world: World, simulated: dict[str, str], flags: tuple[str, ...], tmp_path: Path
) -> None:
    words = (*test_virtual_workers.FLAGS, *flags)
    alone = train_job(gpu_world, 1, tmp_path / "1", simulated, *words)
    support.assert_same_bits(train_job(gpu_world, 2, tmp_path / "2", simulated, *words), alone)


def test_virtual_workers_of_a_loop(gpu_world: World, simulated: dict[str, str], tmp_path: Path) -> None:
    for n in (1, 2):
        words = ("--virtual-workers", "5", test_trainer.SCRIPT, "--tensors")
        train(gpu_world, n, simulated, "--run-dir", tmp_path / str(n), *words)
    support.assert_same_bits(support.newest(tmp_path / "2"), support.newest(tmp_path / "1"))


def test_metrics_of_a_loop(world: World, gpu_world: World, simulated: dict[str, str], tmp_path: Path) -> None:
    words = ("--mode", "local", test_metrics.SCRIPT)
    train(gpu_world, 2, simulated, "--run-dir", tmp_path / "gpu", *words)
    world.train(2, "--device", "cpu", "--run-dir", tmp_path / "cpu", *words, timeout=120)
    values = {}
    for device in ("cpu", "gpu"):
        lines = [line for line in test_metrics.lines(tmp_path / device) if "validation_loss" in line]
        values[device] = [{name: value for name, value in line.items() if name != "time_s"} for line in lines]
    assert values["gpu"] == [pytest.approx(line, abs=1e-6) for line in values["cpu"]]


@pytest.mark.parametrize("flags", [(), ("--accumulate-steps", "2", "--batch-size", "3")])
def test_a_loop_of_ones_own(
    gpu_world: World, simulated: dict[str, str], flags: tuple[str, ...], tmp_path: Path
) -> None:
    output = train(gpu_world, 2, simulated, "--run-dir", tmp_path, test_trainer.SCRIPT, "--tensors", *flags)
    assert "on GPUs" in output
    support.assert_close(support.newest(tmp_path), test_trainer.plain_loop("mlp", "adam", 2), 1e-10)


@pytest.mark.parametrize(("n", "flags"), [(1, ()), (2, ("--bucket-bytes", "100"))])
def test_loops_train_as_in_plain_torch(
    gpu_world: World, simulated: dict[str, str], n: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    names = [name for name in test_loops.OWN if name not in ON_CPUS]
    train(gpu_world, n, simulated, *flags, test_loops.SCRIPT, tmp_path, *names)
    assert {path.stem for path in tmp_path.glob("*.npz")} == set(names)
    for name in names:
        test_loops.assert_plain(name, [*np.load(tmp_path / f"{name}.npz").values()])


@pytest.mark.parametrize("name", ["adafactor", "muon and adamw"])
def test_state_of_whole_tensors_is_resumed(gpu_world: World, name: str, tmp_path: Path) -> None:
    test_loops.assert_plain(name, test_loops.resumed(gpu_world, 2, tmp_path, name, launch=("--device", "gpu")))


@pytest.mark.parametrize(("n", "mode"), [(2, "sync"), (1, "async")])
def test_a_loop_with_parameters_in_bfloat16(
    gpu_world: World, simulated: dict[str, str], n: int, mode: str, tmp_path: Path
) -> None:
    flags = ("--dtype", "bfloat16", "--mode", mode, "--batch-size", str(test_trainer.TOTAL // n))
    train(gpu_world, n, simulated, "--run-dir", tmp_path, test_trainer.SCRIPT, *flags)
    support.assert_close(support.newest(tmp_path), test_trainer.bfloat16_loop(n, None), 1e-6)
