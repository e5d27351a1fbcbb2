"""Runs on simulated GPUs (see tests/simulators/gpu), compared with CPU runs. Tests on real GPUs are in tests/gpu."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mpitrain import checkpoint

from ..support.launch import JOBS, PROGRAMS, ROOT, Mpi, run
from ..support.results import assert_close, assert_same_bits, final
from ..support.world.controller import World

SMALL = JOBS / "small.py"
CNN = ROOT / "jobs" / "fashion_cnn.py"

Train = Callable[..., dict[str, np.ndarray]]


def train(ranks: Mpi | World, n: int, run_dir: Path, *flags: str | Path, env: dict[str, str] | None = None):
    flags = ("--dtype", "float64", "--train-steps", "20", "--validate-steps", "10", *flags)
    done = ranks.train(n, flags[-1], *flags[:-1], "--run-dir", run_dir, env=env)
    return done.stdout + done.stderr, final(run_dir)


@pytest.mark.parametrize(
    ("n", "flags", "job"),
    [
        (2, ["--batch-size", "6"], SMALL),
        (1, ["--devices-per-rank", "2"], SMALL),
        (2, ["--batch-size", "6", "--accumulate-steps", "2", "--no-normalize"], SMALL),
        (2, ["--batch-size", "6", "--clip-norm", "0.5", "--histogram-steps", "10"], SMALL),
        (1, ["--optimizer", "lamb"], SMALL),
        (2, ["--batch-size", "6", "--mode", "local"], SMALL),
        (1, ["--batch-size", "5", "--mode", "async", "--bucket-bytes", "100"], SMALL),
        (
            3,
            ["--batch-size", "5", "--mode", "async", "--ps", "2", "--no-shared-memory", "--bucket-bytes", "100"],
            SMALL,
        ),
        (3, ["--batch-size", "6", "--mode", "backup", "--ps", "1", "--backup-workers", "0", "--no-normalize"], SMALL),
        (1, ["--batch-size", "5"], CNN),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_gpus_agree_with_processors(
    world: World, gpu_world: World, n: int, flags: list[str], job: Path, tmp_path: Path
) -> None:
    output, there = train(gpu_world, n, tmp_path / "gpu", *flags, "--device", "gpu", job)
    _, here = train(world, n, tmp_path / "cpu", *flags, "--device", "cpu", job)
    assert "accuracy" in output
    assert_close(there, here, 1e-9)


@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 3e-2), ("bfloat16", 0.2), ("float16", 3e-2)])
def test_runs_of_lower_precision_come_close(gpu_world: World, precision: str, tolerance: float, tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--optimizer", "momentum", "--train-steps", "10", "--no-normalize")
    _, rounded = train(gpu_world, 1, tmp_path / "low", *flags, "--precision", precision, SMALL)
    _, exact = train(gpu_world, 1, tmp_path / "full", *flags, SMALL)
    assert_close(rounded, exact, tolerance)
    assert any(rounded[name].tobytes() != exact[name].tobytes() for name in exact), "nothing was rounded"


@pytest.mark.parametrize(
    ("more", "computed", "reported"),
    [
        ({}, "cuDNN", 0),
        ({"SIMULATED_CUDNN_CHANNELS": "5"}, "windows", 48),  # three operations on 16 shapes
        ({"SIMULATED_CUDNN_ERRORS": "dgrad=ValueError"}, "forward,filter_gradient", 1),
        ({"SIMULATED_CUDNN_ERRORS": "wgrad=ImportError"}, "forward,data_gradient", 1),
        ({"SIMULATED_CUDNN_ERRORS": "fprop=RuntimeError"}, "windows", 1),
        ({"SIMULATED_NO_CUDART": "1"}, "windows", 1),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else None,
)
def test_convolutions_of_cudnn_agree_with_the_cpu(
    simulated: dict[str, str], more: dict[str, str], computed: str, reported: int
) -> None:
    """This includes strides, paddings, and operations that the simulated cuDNN does not support."""
    precisions = ["bfloat16"] if more else ["float32", "tf32", "bfloat16", "float16"]
    done = run([sys.executable, str(PROGRAMS / "convolutions.py"), *precisions], env={**simulated, **more})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith(tuple(precisions))] == [computed] * 36 * len(
        precisions
    )
    assert sum("cuDNN" in line and "matrix products" in line for line in lines) == reported


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_a_run_with_cudnn_comes_close_to_the_processors(
    world: World, gpu_world: World, precision: str, tolerance: float, tmp_path: Path
) -> None:
    flags = ("--dtype", "float32", "--batch-size", "5", "--train-steps", "4", CNN)
    given = ("--precision", precision, "--log-device-placement")
    output, there = train(gpu_world, 1, tmp_path / "gpu", *given, *flags)
    assert "cuDNN" in output and "matrix products" not in output
    _, here = train(world, 1, tmp_path / "cpu", *flags)
    assert_close(there, here, tolerance)


def test_a_run_twice_is_the_same_bits(gpu_world: World, tmp_path: Path) -> None:
    a, b = (train(gpu_world, 2, tmp_path / name, SMALL)[1] for name in "ab")
    assert_same_bits(a, b)


def test_a_run_continues_from_gpu_to_processor_and_back(world: World, gpu_world: World, tmp_path: Path) -> None:
    _, whole = train(world, 2, tmp_path / "whole", SMALL)
    for steps, ranks in (("7", gpu_world), ("13", world), ("20", gpu_world)):
        parts = train(ranks, 2, tmp_path / "parts", "--train-steps", steps, SMALL)[1]
    assert_close(parts, whole, 1e-9)


FLOAT16 = ("--dtype", "float32", "--precision", "float16", "--no-normalize", "--batch-size", "6")


def run_state(run_dir: Path, step: int) -> dict[str, float]:
    """Return the loss scale state in a run's checkpoint; empty if the checkpoint has none."""
    with checkpoint.Checkpoint(checkpoint.path_for(run_dir / "checkpoints", step)) as opened:
        return opened.attributes.get("run/state/loss_scale", {})


def test_a_run_that_scales_its_loss_continues_with_that_scale(gpu_world: World, tmp_path: Path) -> None:
    """The steps are so large that gradients overflow both before and after the interruption."""
    flags = (*FLOAT16, "--optimizer", "momentum", "--learning-rate", "2", SMALL)
    _, whole = train(gpu_world, 2, tmp_path / "whole", *flags)
    for steps in ("10", "20"):
        _, parts = train(gpu_world, 2, tmp_path / "parts", "--train-steps", steps, *flags)
    assert 65536 > run_state(tmp_path / "parts", 10)["scale"] > run_state(tmp_path / "parts", 20)["scale"]
    assert_same_bits(parts, whole)
    assert run_state(tmp_path / "parts", 20) == run_state(tmp_path / "whole", 20)


def test_the_scale_of_a_loss_is_for_float16_alone(world: World, gpu_world: World, tmp_path: Path) -> None:
    """A run resumed in float32, here on CPUs, drops the scale; a later float16 run starts with the initial scale."""
    first = {"version": 1, "scale": 65536.0}
    expected = {"2": ("float16", gpu_world, {**first, "steps": 2}), "3": ("float32", world, {})}
    expected |= {steps: ("float16", gpu_world, {**first, "steps": int(steps) - 3}) for steps in ("4", "6")}
    for steps, (precision, ranks, held) in expected.items():
        train(ranks, 1, tmp_path, *FLOAT16, "--train-steps", steps, "--precision", precision, SMALL)
        assert run_state(tmp_path, int(steps)) == held


def test_who_computes_where_is_reported(gpu_world: World, tmp_path: Path) -> None:
    output, _ = train(gpu_world, 3, tmp_path, "--log-device-placement", "--batch-size", "4", SMALL)
    assert [f"gpu:{i}" in output for i in range(3)] == [True, True, False]
    assert "every worker's device" in output and "each node" not in output
    assert "3 workers on" in output and "share 2 GPUs" in output


def test_the_gpus_are_kept_with_a_run(openmpi: Mpi, simulated: dict[str, str], driver: str, tmp_path: Path) -> None:
    output, _ = train(openmpi, 1, tmp_path, "--train-steps", "1", SMALL, env={**simulated, "LD_LIBRARY_PATH": driver})
    assert "; on GPUs" in output
    kept = (tmp_path / "config.toml").read_text()
    assert 'nvidia_driver = "580.95.05"' in kept and "NVIDIA H100 80GB HBM3" in kept


def test_one_without_a_gpu_computes_on_its_processor(openmpi: Mpi, simulated: dict[str, str], tmp_path: Path) -> None:
    """The second rank is started with every GPU hidden."""
    words = ["-m", "mpitrain", "train", str(SMALL), "--run-dir", str(tmp_path), "--train-steps", "5"]
    both = [str(openmpi.python), *words]
    hidden = [":", "-n", "1", "env", "CUDA_VISIBLE_DEVICES=", *both]
    done = openmpi_mpmd(openmpi, [*both, *hidden], simulated)
    assert done.returncode == 0, done.stderr
    assert "worker 1 " in done.stdout
    strict = "--no-soft-placement"
    done = openmpi_mpmd(openmpi, [*both, strict, *hidden, strict], simulated)
    assert done.returncode == 2
    assert strict in done.stderr and "1 of 2 workers" in done.stderr


def openmpi_mpmd(mpi: Mpi, words: list[str], env: dict[str, str]):
    """Run programs that are separated by colons; the first has one rank."""
    return run([*mpi.command(1), *words], env=env)


def test_doctor_reports_devices_and_their_assignment(openmpi: Mpi, simulated: dict[str, str], driver: str) -> None:
    env = {**simulated, "LD_LIBRARY_PATH": driver, "COLUMNS": "200"}
    done = openmpi.run(3, "-m", "mpitrain", "doctor", env=env)
    assert done.returncode == 0, done.stderr
    output = " ".join(done.stdout.split())
    assert "79 GiB of 80 GiB free, 31 C, driver 580.95.05" in output
    assert "20 GiB of 80 GiB free, driver 580.95.05; in use by python3 (pid 4194305, 59.0 GiB)" in output
    assert "0 on gpu:0, 1 on gpu:1, 2 on gpu:0" in output and "share 2 GPUs" in output


@pytest.mark.parametrize(
    ("setting", "status", "check", "verdict", "part"),
    [
        ({}, 0, "kernels", "pass", ""),
        ({}, 0, "cuDNN", "pass", "9.24"),
        ({"SIMULATED_COMPILER_LOG": "a.cu(1): error: b"}, 1, "kernels", "failure", "a.cu(1): error: b"),
        ({"SIMULATED_CUDNN_ERRORS": "fprop=RuntimeError"}, 0, "cuDNN", "warning", "fprop failed"),
    ],
)
def test_doctor_tries_the_libraries(
    simulated: dict[str, str], setting: dict[str, str], status: int, check: str, verdict: str, part: str, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "mpitrain", "doctor", "-n", "1", "--json", "--run-dir", str(tmp_path / "runs")]
    done = run(words, env={**simulated, **setting})
    assert done.returncode == status, done.stderr
    (finding,) = [finding for finding in json.loads(done.stdout) if finding["check"] == check]
    assert finding["verdict"] == verdict
    assert part in finding["found"]
    assert bool(finding["advice"]) == (verdict != "pass")


# Sums of gradients.

SUMMED = ("--batch-size", "5", "--no-normalize", "--bucket-bytes", "100")  # one bucket per layer


# Results that the host reads later.


@pytest.mark.parametrize("policy", ["stop", "skip", "ignore"])
def test_a_loss_that_is_not_finite(
    world: World, gpu_world: World, order: dict[str, str], policy: str, tmp_path: Path
) -> None:
    """GPUs give the CPU's results: the same message with the same step and worker, and the same parameters."""
    words = [JOBS / "diverging.py", "--nan", policy, "--dtype", "float64", "--log-steps", "10", "--save-steps", "5"]
    there = ["--device", "gpu", *words, "--run-dir", tmp_path / "gpu"]
    here = ["--device", "cpu", *words, "--run-dir", tmp_path / "cpu"]
    if policy == "stop":
        message = gpu_world.refusal(2, *there, env=order)
        assert message == world.refusal(2, *here) and "at step 8 on worker 1" in message
        return
    done = gpu_world.train(2, *there, env=order)
    world.train(2, *here)
    found, expected = final(tmp_path / "gpu"), final(tmp_path / "cpu")
    if policy == "skip":
        assert_close(found, expected, 1e-9)
        assert "skipped" in done.stdout
    else:
        assert all(np.isnan(found[name]).all() == np.isnan(expected[name]).all() for name in expected)


def test_a_checkpoint_before_a_loss_is_known_is_not_saved(
    gpu_world: World, order: dict[str, str], tmp_path: Path
) -> None:
    """Step 8's loss is not finite, and the host is ahead of the GPU: the host must read the loss before it saves."""
    words = [JOBS / "diverging.py", "--run-dir", tmp_path, "--save-steps", "1", "--device", "gpu"]
    assert "at step 8 on worker 1" in gpu_world.refusal(2, *words, env=order)
    assert max(int(path.stem.split("-")[-1]) for path in (tmp_path / "checkpoints").glob("*.h5")) == 7


# Graphs.


def launches(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize(
    ("job", "flags", "expected"),
    [
        (SMALL, ["--no-normalize"], 16),  # of 20 steps: not the first two, nor the first two with data on the GPU
        (SMALL, ["--no-normalize", "--accumulate-steps", "2"], 36),
        (SMALL, ["--trace"], 0),
        (JOBS / "diverging.py", [], 0),  # the job has a user-defined layer without declared properties
    ],
    ids=["whole", "in parts", "traced", "own layer"],
)
def test_steps_are_replayed(
    gpu_world: World, order: dict[str, str], job: Path, flags: list[str], expected: int, tmp_path: Path
) -> None:
    report = tmp_path / "report"
    report.mkdir()
    train(gpu_world, 1, tmp_path / "run", *flags, job, env={**order, "SIMULATED_REPORT": str(report)})
    assert launches(report) == expected


def test_what_cannot_be_recorded_is_done_step_by_step(
    world: World, gpu_world: World, order: dict[str, str], tmp_path: Path
) -> None:
    """A layer that declares itself static but waits for the GPU."""
    job = tmp_path / "job.py"
    job.write_text(
        "from small import job as make\n"
        "from mpitrain import nn\n\n\n"
        "class Waits(nn.Layer):\n"
        "    static = True\n\n"
        "    def forward(self, x, ctx):\n"
        "        float(x[0, 0])\n"
        "        return x\n\n"
        "    def backward(self, dy):\n"
        "        return dy\n\n\n"
        "def job():\n"
        "    made = make(normalize=False)\n"
        "    made.model = nn.Sequential(*made.model.layers, Waits())\n"
        "    return made\n"
    )
    output, there = train(gpu_world, 1, tmp_path / "gpu", job, env={**order, "PYTHONPATH": str(JOBS)})
    assert output.count("CUDA graphs") == 1
    _, here = train(world, 1, tmp_path / "cpu", "--no-normalize", SMALL)
    assert_close(there, here, 1e-9)


def test_a_kernel_without_a_form_for_gpus_runs_on_the_processor(
    openmpi: Mpi, world: World, gpu_world: World, simulated: dict[str, str], tmp_path: Path
) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "from small import job as make\n"
        "from mpitrain import nn\n"
        "from mpitrain.core.kernels import kernel\n\n\n"
        "@kernel\n"
        "def relu(x, y):\n"
        "    for i in range(x.size):\n"
        "        y.flat[i] = 2 * x.flat[i]\n\n\n"
        "class Doubled(nn.Layer):\n"
        "    def forward(self, x, ctx):\n"
        "        y = self.buffer('y', x.shape)\n"
        "        self.dispatch(relu)(x, y)\n"
        "        return y\n\n"
        "    def backward(self, dy):\n"
        "        return 2 * dy\n\n\n"
        "def job():\n"
        "    made = make(normalize=False)\n"
        "    made.model = nn.Sequential(*made.model.layers, Doubled())\n"
        "    return made\n"
    )
    path = {"PYTHONPATH": f"{simulated['PYTHONPATH']}{os.pathsep}{JOBS}"}
    output, there = train(gpu_world, 1, tmp_path / "gpu", job, env={**simulated, **path})
    assert output.count("the kernel relu of") == 1
    _, here = train(world, 1, tmp_path / "cpu", "--device", "cpu", job, env={"PYTHONPATH": str(JOBS)})
    assert_close(there, here, 1e-9)
    words = ["-m", "mpitrain", "train", job, "--run-dir", tmp_path / "hard", "--no-soft-placement"]
    done = openmpi.run(1, *words, env={**simulated, **path})
    assert done.returncode == 1 and "--no-soft-placement: the kernel relu" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("returned", ["float(loss)", "loss"], ids=["a number", "an array"])
def test_a_loss_of_ones_own(
    world: World, gpu_world: World, order: dict[str, str], returned: str, mode: str, tmp_path: Path
) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "from small import job as make\n"
        "from mpitrain import nn\n\n\n"
        "class Squares(nn.Loss):\n"
        "    def __call__(self, outputs, labels, weight):\n"
        "        loss = (weight * (outputs * outputs)).reshape(-1)\n"
        "        loss = self.device.xp.add.reduce(loss)\n"
        f"        return {returned}, 2 * weight * outputs\n\n"
        "    def evaluate(self, outputs, labels):\n"
        "        return float(self.device.xp.add.reduce((outputs * outputs).reshape(-1))), None\n\n\n"
        "def job():\n"
        "    made = make(normalize=False)\n"
        "    made.loss = Squares()\n"
        "    return made\n"
    )
    flags, path = ("--mode", mode, "--train-steps", "6", job), {"PYTHONPATH": str(JOBS)}
    _, there = train(gpu_world, 1, tmp_path / "gpu", *flags, env={**order, **path})
    _, here = train(world, 1, tmp_path / "cpu", "--device", "cpu", *flags, env=path)
    assert_close(there, here, 1e-9)
