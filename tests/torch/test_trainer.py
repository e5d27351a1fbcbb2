"""Training loops with a Trainer: they give the results of a plain loop, train in every mode, and end correctly."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import mpitrain
from mpitrain.api.script_state import ScriptState
from mpitrain.data.permutation import order
from mpitrain.errors import CheckpointError, JobError
from mpitrain.plan.config import FIELDS
from mpitrain.plan.option import info_of
from mpitrain.pytorch.translation import translated

from ..support.launch import ROOT, Mpi, one_line, run
from ..support.world.controller import World
from . import models
from .support import SEED, assert_close, assert_same_bits, newest

SCRIPT = Path(__file__).parent / "own_loop.py"
TOTAL = 12  # examples of a step


def start(mpi: Mpi, n: int, run_dir: Path, *flags: object, launch: tuple[object, ...] = ()):
    """Run the script on ``n`` ranks by ``mpitrain run``."""
    words = ["run", "-n", n, "--run-dir", run_dir, *launch, SCRIPT, *flags]
    return run([str(mpi.python), "-m", "mpitrain", *map(str, words)], timeout=120)


def output(world: World, n: int, run_dir: Path, *flags: object, launch: tuple[object, ...] = ()) -> str:
    """Run the script on ranks that stay; return its output."""
    return world.train(n, "--run-dir", run_dir, *map(str, launch), SCRIPT, *map(str, flags), timeout=120).stdout


def train(
    world: World, n: int, run_dir: Path, *flags: object, launch: tuple[object, ...] = ()
) -> dict[str, np.ndarray]:
    output(world, n, run_dir, *flags, launch=launch)
    return newest(run_dir)


def refusal(world: World, n: int, run_dir: Path, *flags: object, launch: tuple[object, ...] = ()) -> str:
    """Return the error line of the script, which all ranks must refuse."""
    return world.refusal(n, "--run-dir", run_dir, *map(str, launch), SCRIPT, *map(str, flags), timeout=120)


def plain_loop(
    kind: str, optimizer: str, epochs: int, scheduler: str = "", clip_norm: float | None = None, seed: int = SEED
) -> dict[str, np.ndarray]:
    """Train in a plain torch loop, on whole batches in the order of mpitrain; return the parameters and buffers."""
    from .own_loop import make_optimizer, make_scheduler

    torch.manual_seed(seed)
    model = models.make(kind).double()
    loss_of = models.per_token if kind == "gpt" else nn.CrossEntropyLoss()
    rule = make_optimizer(optimizer, model)
    schedule = make_scheduler(scheduler, rule)
    examples, labels = models.arrays(kind)
    steps = len(examples) // TOTAL
    for step in range(epochs * steps):
        chosen = order(step * TOTAL, TOTAL, len(examples), SEED, None)
        rule.zero_grad()
        loss_of(model(torch.from_numpy(examples[chosen])), torch.from_numpy(labels[chosen])).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        rule.step()
        if schedule is not None and (step + 1) % steps == 0:
            schedule.step()
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "n"), [("mlp", 1), ("cnn", 2), ("lstm", 3), ("gpt", 2)])
def test_ranks_train_as_a_plain_loop(world: World, kind: str, n: int, tmp_path: Path) -> None:
    stored = train(world, n, tmp_path, "--kind", kind, "--batch-size", TOTAL // n)
    assert_close(stored, plain_loop(kind, "adam", 2), 1e-10)


@pytest.mark.parametrize(
    ("optimizer", "flags", "scheduler", "clip_norm", "tolerance"),
    [
        ("groups", ["--scheduler", "steps"], "steps", None, 1e-10),
        ("l2", ["--accumulate-steps", 2, "--batch-size", 3], "", None, 1e-10),
        ("nesterov", ["--clip-norm", 0.01, "--tensors"], "", 0.01, 1e-6),  # torch adds 1e-6 to the norm
        ("rmsprop", ["--scheduler", "steps"], "steps", None, 1e-10),
    ],
)
def test_optimizers_of_torch(
    world: World,
    optimizer: str,
    flags: list[object],
    scheduler: str,
    clip_norm: float | None,
    tolerance: float,
    tmp_path: Path,
) -> None:
    stored = train(world, 2, tmp_path, "--optimizer", optimizer, "--epochs", 3, *flags)
    assert_close(stored, plain_loop("mlp", optimizer, 3, scheduler, clip_norm), tolerance)


def test_a_server_updates_with_an_optimizer_of_torch(world: World, tmp_path: Path) -> None:
    flags = ["--optimizer", "nadam", "--batch-size", TOTAL]
    stored = train(world, 2, tmp_path, *flags, launch=("--mode", "async", "--ps", "1"))
    assert_close(stored, plain_loop("mlp", "nadam", 2, seed=1), 1e-10)  # rank 1 is the worker, and so the chief


def test_the_state_of_an_optimizer_of_torch_is_resumed_on_other_ranks(world: World, tmp_path: Path) -> None:
    flags = ["--optimizer", "nadam", "--epochs"]
    train(world, 3, tmp_path, *flags, 1, "--batch-size", TOTAL // 3)
    stored = train(world, 2, tmp_path, *flags, 2, "--batch-size", TOTAL // 2)
    assert_close(stored, plain_loop("mlp", "nadam", 2), 1e-10)


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.LBFGS(p), lambda p: torch.optim.SGD([*p, nn.Parameter(torch.zeros(3))], 0.1)]
)
def test_optimizers_that_are_refused(make) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(JobError):
        translated(make(list(model.parameters())), model)


@pytest.mark.parametrize("owner", [{"worst": 0.0}, nn.Linear(1, 1)])
def test_keys_that_a_state_does_not_have_are_refused(owner: object) -> None:
    with pytest.raises(JobError, match="keys"):
        ScriptState(None).add("values", owner, False, ["best"])


def test_an_optimizer_of_whole_tensors_needs_float32() -> None:
    model = nn.Linear(3, 2).bfloat16()
    with pytest.raises(JobError, match="weight"):
        translated(torch.optim.Adafactor(model.parameters()), model)


@pytest.mark.parametrize(
    ("n", "launch"),
    [
        (2, ["--mode", "local", "--local-steps", "3"]),
        (2, ["--mode", "local", "--local-steps", "3", "--outer-optimizer", "nesterov", "--overlap-steps", "2"]),
        (2, ["--mode", "local", "--local-steps", "3", "--local-after", "10"]),
        (3, ["--mode", "async", "--ps", "1"]),
        (2, ["--mode", "ssp"]),
        (4, ["--mode", "backup", "--ps", "1"]),
    ],
)
def test_every_mode_trains_a_loop(world: World, n: int, launch: list[str], tmp_path: Path) -> None:
    # In 24 epochs the loss falls even if a worker starts late, or most of its gradients arrive late.
    text = output(world, n, tmp_path, "--epochs", 24, launch=(*launch,))
    workers = n - launch.count("--ps")
    found = re.findall(r"losses ([\d.]+) ([\d.]+)", text)
    assert len(found) == workers
    assert sum(float(last) for _, last in found) < sum(float(first) for first, _ in found)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", status["train_steps"])


def test_launchers(openmpi: Mpi, world: World, tmp_path: Path) -> None:
    expected = train(world, 1, tmp_path / "run", "--batch-size", TOTAL)
    for words in ([*openmpi.command(1), str(openmpi.python)], [str(openmpi.python)]):
        folder = tmp_path / str(len(words))
        folder.mkdir()
        done = run([*words, str(SCRIPT), "--batch-size", str(TOTAL)], cwd=folder, timeout=120)
        assert done.returncode == 0, done.stderr
        assert_same_bits(newest(next((folder / "runs").iterdir())), expected)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_killed_run_resumes_exactly(openmpi: Mpi, world: World, dtype: str, tmp_path: Path) -> None:
    flags = ["--dtype", dtype, "--dropout", 0.3, "--epochs", 3, "--at", 11]
    expected = train(world, 2, tmp_path / "whole", *flags)
    launch = ("--max-restarts", 1, "--save-steps", 4)
    done = start(openmpi, 2, tmp_path / "killed", *flags, "--fault", "kill", launch=launch)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restart 1 of 1" in done.stderr
    assert "epochs [1, 2]" in done.stdout  # the newest checkpoint is of step 8
    assert_same_bits(newest(tmp_path / "killed"), expected)


def bfloat16_loop(n: int, clip_norm: float | None) -> dict[str, np.ndarray]:
    """Train a module that computes in bfloat16, with parameters and gradients in float32; return the parameters."""
    torch.manual_seed(SEED)
    model = models.make("mlp").bfloat16()
    values = [parameter.detach().float() for parameter in model.parameters()]
    rule = torch.optim.Adam(values, 0.01)
    examples, labels = models.arrays("mlp")
    for step in range(2 * len(examples) // TOTAL):
        for value in values:
            value.grad = torch.zeros_like(value)
        for chosen in np.split(order(step * TOTAL, TOTAL, len(examples), SEED, None), n):
            outputs = model(torch.from_numpy(examples[chosen]).float().bfloat16())
            loss = nn.functional.cross_entropy(outputs, torch.from_numpy(labels[chosen]))
            gradients = torch.autograd.grad(loss.float() / n, list(model.parameters()))
            for value, gradient in zip(values, gradients, strict=True):
                value.grad += gradient
        if clip_norm is not None:
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.grad = value.grad.bfloat16()
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            for parameter, value in zip(model.parameters(), values, strict=True):
                value.grad, parameter.grad = parameter.grad.float(), None
        rule.step()
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.data.copy_(value)
    return {name: value.numpy() for (name, _), value in zip(model.named_parameters(), values, strict=True)}


@pytest.mark.parametrize(("n", "clip_norm"), [(1, None), (1, 0.05), (2, None), (2, 0.05)])
def test_parameters_in_bfloat16_are_copies_of_float32(
    world: World, n: int, clip_norm: float | None, tmp_path: Path
) -> None:
    flags = [] if clip_norm is None else ["--clip-in-loop", clip_norm]
    stored = train(world, n, tmp_path, "--dtype", "bfloat16", "--batch-size", TOTAL // n, *flags)
    assert stored["params/0.weight"].dtype == np.float32
    assert_close(stored, bfloat16_loop(n, clip_norm), 1e-6)


def test_resuming_with_another_number_of_ranks_trains_the_epochs_that_are_left(world: World, tmp_path: Path) -> None:
    train(world, 2, tmp_path, "--batch-size", 6, "--epochs", 2)
    assert "epochs [2, 3]" in output(world, 1, tmp_path, "--batch-size", 6, "--epochs", 4)
    examples, _ = models.arrays("mlp")
    assert (
        json.loads((tmp_path / "status.json").read_text())["step"] == len(examples) * 2 // 12 + len(examples) * 2 // 6
    )


def test_resuming_in_another_order_is_refused(openmpi: Mpi, world: World, tmp_path: Path) -> None:
    train(world, 2, tmp_path, "--epochs", 1)
    done = start(openmpi, 2, tmp_path, "--epochs", 2, "--in-order")
    assert done.returncode == 2, done.stderr
    assert "Shuffled" in one_line(done.stderr)
    train(world, 2, tmp_path, "--epochs", 2)


def test_stopping_early(openmpi: Mpi, tmp_path: Path) -> None:
    done = start(openmpi, 2, tmp_path, "--fault", "stop")
    assert done.returncode == 0, done.stderr
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["reason"], status["step"]) == ("finished early", "enough", 6)


def test_an_exception_on_one_rank_ends_all(openmpi: Mpi, tmp_path: Path) -> None:
    done = start(openmpi, 2, tmp_path, "--fault", "raise")
    assert done.returncode == 1
    assert json.loads((tmp_path / "failure.json").read_text())["rank"] == 1
    assert done.stderr.count("Traceback") == 1
    assert json.loads((tmp_path / "status.json").read_text())["state"] in ("failed", "running")


@pytest.mark.parametrize(
    ("n", "fault"),
    [
        *((1, fault) for fault in ("forget", "no step", "optimizer", "state", "second")),
        *((1, fault) for fault in ("closure", "group", "amsgrad", "register", "steps")),
        *((1, fault) for fault in ("other state", "different steps", "state after training")),
        (1, "replaced data"),
        (1, "own update in bfloat16"),
        (2, "own update"),
        (1, "gradient before backward"),
        (2, "gradient after backward"),
        (2, "ranks differ"),
        (2, "state on one rank"),
        (2, "states differ"),
    ],
)
def test_mistakes_in_the_loop(world: World, n: int, fault: str, tmp_path: Path) -> None:
    refusal(world, n, tmp_path, "--fault", fault)


@pytest.mark.parametrize("fault", ["change on one rank", "change after step on one rank", "exit", "break"])
def test_mistakes_after_which_a_rank_ends_the_others(openmpi: Mpi, fault: str, tmp_path: Path) -> None:
    done = start(openmpi, 2, tmp_path, "--fault", fault)
    assert done.returncode not in (0, 75), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


TWO_BATCHES = """
import torch
import mpitrain

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
trainer = mpitrain.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = trainer.loader(torch.utils.data.TensorDataset(torch.randn(8, 2)), batch_size=4)
for _ in trainer.epochs(1):
    for (inputs,) in loader:
        trainer.backward(model(inputs).mean())
        trainer.step()
trainer.print("ended")
"""


def test_a_backward_pass_after_step_needs_the_next_micro_batch(world: World, tmp_path: Path) -> None:
    script, again = tmp_path / "script.py", "trainer.step()\n        trainer.backward(model(inputs).mean())"
    script.write_text(TWO_BATCHES.replace("lr=0.1)", "lr=0.1), accumulate_steps=2").replace("trainer.step()", again))
    assert "backward" in world.refusal(1, "--run-dir", tmp_path / "run", script)


def test_a_worker_that_gets_no_batch_ends_as_the_others(world: World, tmp_path: Path) -> None:
    """With a server, three workers divide two batches."""
    script = tmp_path / "script.py"
    script.write_text(TWO_BATCHES)
    flags = ["--mode", "async", "--ps", "1", "--run-dir", tmp_path / "run"]
    assert "ended" in world.train(4, *flags, script).stdout


@pytest.mark.parametrize(
    ("n", "launch"),
    [
        (2, []),
        (3, ["--mode", "async", "--ps", "1", "--no-shared-memory"]),
        (3, ["--mode", "ssp", "--ps", "1"]),
        (3, ["--mode", "backup", "--ps", "1"]),
    ],
)
def test_views_of_parameters_stay_valid_after_training(world: World, n: int, launch: list[str], tmp_path: Path) -> None:
    output(world, n, tmp_path, "--fault", "alias", launch=(*launch,))


def test_a_second_training_whose_servers_have_ended_is_refused(openmpi: Mpi, tmp_path: Path) -> None:
    done = start(openmpi, 2, tmp_path, "--fault", "second", launch=("--mode", "async", "--ps", "1"))
    assert done.returncode == 2, done.stderr
    one_line(done.stderr)


def test_a_collective_on_one_rank_ends_the_run(openmpi: Mpi, tmp_path: Path) -> None:
    done = start(openmpi, 2, tmp_path, "--fault", "mean on one rank", launch=("--hang-timeout", 5))
    assert done.returncode == 2, done.stderr
    assert "--hang-timeout" in one_line(done.stderr)


@pytest.mark.parametrize(("fault", "status"), [("closure", 2), ("raise", 1), ("exit", 1)])
def test_errors_without_a_launcher(openmpi: Mpi, fault: str, status: int, tmp_path: Path) -> None:
    done = run([str(openmpi.python), str(SCRIPT), "--fault", fault], cwd=tmp_path, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    if fault == "raise":
        assert done.stderr.startswith("Traceback") and done.stderr.endswith("ArithmeticError: this worker fails\n")
    else:
        one_line(done.stderr)
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "status.json").read_text())["state"] == "failed"


def test_the_scheduler_has_taken_a_step_for_each_epoch(world: World, tmp_path: Path) -> None:
    text = output(world, 1, tmp_path, "--scheduler", "steps", "--epochs", 3, "--batch-size", TOTAL)
    assert "rate 0.001250 0.001250" in text


def test_torchrun_is_refused(openmpi: Mpi) -> None:
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = run([str(openmpi.python), str(SCRIPT)], env=environment)
    assert done.returncode != 0
    assert "LaunchError" in done.stderr


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        (("--optimizer", "lbfgs"), "sync"),
        (("--optimizer", "adafactor"), "async"),
        (("--fault", "state for servers"), "backup"),
        (("--optimizer", "none"), "sync"),
        (("--optimizer", "a number"), "sync"),
        (("--optimizer", "of two kinds"), "sync"),
        (("--optimizer", "one parameter twice"), "sync"),
        (("--optimizer", "two"), "async"),
        (("--optimizer", "two", "--clip-norm", "1"), "sync"),
        (("--optimizer", "two", "--fault", "unknown optimizer"), "sync"),
        (("--optimizer", "two", "--fault", "different optimizers"), "sync"),
        (("--optimizer", "two", "--fault", "optimizer on one rank"), "sync"),
        (("--optimizer", "two", "--fault", "step twice"), "sync"),
    ],
)
def test_a_mistake_in_the_arguments(world: World, flags: tuple[str, ...], mode: str, tmp_path: Path) -> None:
    refusal(world, 2, tmp_path, *flags, launch=("--mode", mode))


@pytest.mark.parametrize("flag", ["--train-steps", "--validate-steps", "--validate-secs"])
def test_options_that_a_trainer_gets_in_another_way(world: World, flag: str, tmp_path: Path) -> None:
    line = refusal(world, 1, tmp_path, launch=(flag, "5"))
    name = flag.removeprefix("--").replace("-", "_")
    assert f"{name} is no option of a Trainer: {info_of(FIELDS[name]).in_scripts}" in line


def test_load_needs_the_model(world: World, tmp_path: Path) -> None:
    stored = train(world, 2, tmp_path, "--kind", "cnn")
    with pytest.raises(CheckpointError, match="model="):  # and does not run the script
        mpitrain.load(tmp_path)
    module = models.make("cnn").double()
    assert mpitrain.load(tmp_path, model=module) is module
    assert not module.training
    values = {name: value.numpy() for name, value in module.state_dict().items()}
    assert all(np.array_equal(values[name], stored[f"params/{name}"]) for name in values if f"params/{name}" in stored)
    with pytest.raises(CheckpointError):
        mpitrain.load(tmp_path, model=models.make("mlp"))


def test_the_example(world: World, tmp_path: Path) -> None:
    done = world.train(2, "--run-dir", tmp_path, ROOT / "jobs" / "trainer_digits.py", "--epochs", "5")
    assert float(done.stdout.split("validation accuracy ")[-1].split()[0]) > 0.9
