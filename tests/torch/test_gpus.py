"""PyTorch modules on GPUs, which a simulator of CuPy provides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ..support.launch import Mpi
from . import support, test_loops, test_metrics, test_trainer

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
PROGRAM = Path(__file__).with_name("on_simulated_gpu.py")


def on_gpus(mpi: Mpi, n: int, run_dir: Path, env: dict[str, str], *flags: str) -> dict[str, np.ndarray]:
    """Train on ``n`` ranks with simulated GPUs; return the arrays of the checkpoint."""
    words = ("train", support.JOB, "--run-dir", run_dir, "--threads", "1", "--device", "gpu", "--dtype", "float64")
    done = mpi.run(n, PROGRAM, *words, *flags, env=env, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
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
    openmpi: Mpi, simulated: dict[str, str], n: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    stored = on_gpus(openmpi, n, tmp_path, simulated, "--kind", "all", "--optimizer", "momentum", *flags)
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
    openmpi: Mpi, simulated: dict[str, str], n: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    there = on_gpus(openmpi, n, tmp_path / "gpu", simulated, *flags)
    here = support.train(openmpi, n, tmp_path / "cpu", "--device", "cpu", "--dtype", "float64", *flags)
    for name, value in here.items():
        np.testing.assert_allclose(there[name], value, atol=1e-9, rtol=0, err_msg=name)


def test_metrics_of_a_loop(openmpi: Mpi, simulated: dict[str, str], tmp_path: Path) -> None:
    values = {}
    for device, program, env in (("cpu", ("-m", "mpitrain"), {}), ("gpu", (PROGRAM,), simulated)):
        folder = tmp_path / device
        words = ("train", "--mode", "local", "--device", device, "--run-dir", folder, test_metrics.SCRIPT)
        done = openmpi.run(2, *program, *words, env=env, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [line for line in test_metrics.lines(folder) if "validation_loss" in line]
        values[device] = [{name: value for name, value in line.items() if name != "time_s"} for line in lines]
    assert values["gpu"] == [pytest.approx(line, abs=1e-6) for line in values["cpu"]]


@pytest.mark.parametrize("flags", [(), ("--accumulate-steps", "2", "--batch-size", "3")])
def test_a_loop_of_ones_own(openmpi: Mpi, simulated: dict[str, str], flags: tuple[str, ...], tmp_path: Path) -> None:
    words = ("train", "--device", "gpu", "--run-dir", tmp_path, test_trainer.SCRIPT, "--tensors", *flags)
    done = openmpi.run(2, PROGRAM, *words, env=simulated, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on GPUs" in done.stdout
    support.assert_close(support.newest(tmp_path), test_trainer.plain_loop("mlp", "adam", 2), 1e-10)


@pytest.mark.parametrize(("n", "flags"), [(1, ()), (2, ("--bucket-bytes", "100"))])
def test_loops_train_as_in_plain_torch(
    openmpi: Mpi, simulated: dict[str, str], n: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    names = [name for name in test_loops.OWN if name not in ON_CPUS]
    words = ("train", "--device", "gpu", *flags, test_loops.SCRIPT, tmp_path, *names)
    done = openmpi.run(n, PROGRAM, *words, env=simulated, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.stem for path in tmp_path.glob("*.npz")} == set(names)
    for name in names:
        test_loops.assert_plain(name, [*np.load(tmp_path / f"{name}.npz").values()])


@pytest.mark.parametrize(("n", "mode"), [(2, "sync"), (1, "async")])
def test_a_loop_with_parameters_in_bfloat16(
    openmpi: Mpi, simulated: dict[str, str], n: int, mode: str, tmp_path: Path
) -> None:
    flags = ("--dtype", "bfloat16", "--mode", mode, "--batch-size", str(test_trainer.TOTAL // n))
    words = ("train", "--device", "gpu", "--run-dir", tmp_path, test_trainer.SCRIPT, *flags)
    done = openmpi.run(n, PROGRAM, *words, env=simulated, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    support.assert_close(support.newest(tmp_path), test_trainer.bfloat16_loop(n, None), 1e-6)
