"""PyTorch modules, and loops of scripts, with virtual workers: the same bits on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mpitrain.pytorch.buffers import Buffers

from ..support.world.controller import World
from . import test_trainer
from .support import JOB, assert_same_bits, newest

FLAGS = ("--virtual-workers", "6", "--batch-size", "4", "--validate-steps", "10")


def train(world: World, n: int, run_dir: Path, *flags: str) -> dict[str, np.ndarray]:
    world.train(n, JOB, "--run-dir", run_dir, *FLAGS, *flags, timeout=120)
    return newest(run_dir)


@pytest.mark.parametrize(
    "flags",
    [
        ["--kind", "cnn", "--normalize", "own", "--dropout", "0.3", "--dataset", "tensors"],
        ["--kind", "gpt", "--dropout", "0.3", "--optimizer", "adamw", "--clip-norm", "0.2"],
        ["--kind", "lstm", "--average", "--accumulate-steps", "2"],
        ["--kind", "cnn", "--normalize", "own", "--dataset", "tensors", "--data-workers", "2", "--no-shared-memory"],
        ["--kind", "cnn", "--normalize", "own", "--dropout", "0.3", "--dataset", "tensors", "--mode", "local"],
    ],
    ids=" ".join,
)
def test_modules(world: World, flags: list[str], tmp_path: Path) -> None:
    alone = train(world, 1, tmp_path / "1", *flags)
    assert "buffers/2.num_batches_tracked" not in alone or alone["buffers/2.num_batches_tracked"] == 20
    for n in (2, 4, 6):
        assert_same_bits(train(world, n, tmp_path / str(n), *flags), alone)


@pytest.mark.parametrize(
    ("flags", "launch"),
    [
        (["--kind", "cnn", "--normalize", "own", "--clip-in-loop", "0.2", "--scheduler", "cosine"], []),
        (["--kind", "mlp", "--dropout", "0.3", "--tensors", "--accumulate-steps", "2"], []),
        (["--kind", "mlp", "--clip-norm", "0.2", "--interval", "step", "--scheduler", "steps"], ["--no-shared-memory"]),
        (["--kind", "gpt", "--optimizer", "adafactor"], []),
        (["--kind", "mlp", "--dtype", "bfloat16"], []),
    ],
    ids=" ".join,
)
def test_loops_of_scripts(world: World, flags: list[str], launch: list[str], tmp_path: Path) -> None:
    flags, launch = [*flags, "--batch-size", "2"], ["--virtual-workers", "6", *launch]
    alone = test_trainer.train(world, 1, tmp_path / "1", *flags, launch=tuple(launch))
    for n in (2, 4, 6):
        assert_same_bits(test_trainer.train(world, n, tmp_path / str(n), *flags, launch=tuple(launch)), alone)


def test_a_loop_trains_as_a_plain_loop_does(world: World, tmp_path: Path) -> None:
    launch = ("--virtual-workers", "4")
    stored = test_trainer.train(world, 3, tmp_path, "--kind", "mlp", "--batch-size", "3", launch=launch)
    test_trainer.assert_close(stored, test_trainer.plain_loop("mlp", "adam", 2), 1e-10)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--optimizer", "two", "--fault", "step twice"], "2 optimizers"),
        (["--fault", "no step"], "call step after each backward"),
    ],
)
def test_loops_whose_result_would_depend_on_the_ranks(
    world: World, flags: list[str], word: str, tmp_path: Path
) -> None:
    assert word in test_trainer.refusal(world, 2, tmp_path, *flags, launch=("--virtual-workers", "4"))


def test_a_loop_cannot_train_several_workers_in_turn(world: World, tmp_path: Path) -> None:
    launch = ("--virtual-workers", "4", "--mode", "local")
    assert "loop of a script" in test_trainer.refusal(world, 2, tmp_path, launch=launch)


LOOP = """
import random
import numpy as np, torch, mpitrain
from torch import nn

torch.manual_seed(0)
examples = torch.randn(211, 3)
data = torch.utils.data.TensorDataset(examples, (examples.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
trainer = mpitrain.Trainer(model, optimizer)
trainer.loader(data, batch_size=5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
validation = torch.utils.data.DataLoader(data, batch_size=20)

def clamp():
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)

for _, (inputs, labels) in trainer.batches(8):
    inputs = inputs * random.uniform(0.8, 1.2) + torch.from_numpy(np.random.randn(*inputs.shape)).float()
    trainer.backward(nn.functional.cross_entropy(model(inputs), labels))
    optimizer.step()
    if {when}:
        {action}
"""
ACTIONS = [
    "scheduler.step()",
    "optimizer.param_groups[0]['lr'] *= 0.9",
    "trainer.change_parameters(clamp)",
    "trainer.evaluate(validation, {'loss': nn.CrossEntropyLoss()})",
]


@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_done_once_in_a_step(world: World, action: str, tmp_path: Path) -> None:
    script, words = tmp_path / "loop.py", ("--virtual-workers", "6", "--run-dir")
    script.write_text(LOOP.replace("{when}", "trainer.sync_gradients").replace("{action}", action))
    for n in (1, 2, 4):
        world.train(n, *words, tmp_path / str(n), script)
        assert_same_bits(newest(tmp_path / str(n)), newest(tmp_path / "1"))
    script.write_text(LOOP.replace("{when}", "True").replace("{action}", action))
    assert "trainer.sync_gradients" in world.refusal(1, *words, tmp_path / "refused", script)


ONCE_IN_A_STEP = """
import random, sys
import numpy as np, torch, mpitrain
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 2))
        self.rare = nn.Parameter(torch.ones(2))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, inputs):
        outputs = self.layers(inputs)
        return outputs * self.rare if inputs[0, 0] > 0.5 else outputs

torch.manual_seed(0)
examples = torch.randn(211, 3)
data = torch.utils.data.TensorDataset(examples, (examples.sum(1) > 0).long())
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
average = torch.optim.swa_utils.AveragedModel(model)
trainer = mpitrain.Trainer(model, optimizer)
trainer.loader(data, batch_size=5)
seen, counts = [], torch.zeros(2)
for step, (inputs, labels) in trainer.batches(8):
    optimizer.param_groups[0]["weight_decay"] = 0.01 * (step + 1)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    trainer.backward(loss)
    mean, sums, all_means = trainer.mean(loss), trainer.sum(inputs), trainer.gather(float(inputs.mean()))
    counts.zero_().add_(torch.bincount(labels, minlength=2))
    numbers = trainer.sum(counts)
    if trainer.sync_gradients:
        optimizer.param_groups[0]["lr"] = 0.1 * mean * random.random()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn_like(parameter), alpha=0.1 * np.random.rand())
        seen += [mean, *sums.flatten().tolist(), *all_means, *numbers.tolist(), float(norm)]
    optimizer.step()
    if trainer.sync_gradients:
        average.update_parameters(model)
        seen += [*model.layers[1].running_mean.tolist(), int(model.layers[1].num_batches_tracked)]
if trainer.chief:
    np.save(sys.argv[1], [*seen, *(float(buffer.double().sum()) for buffer in average.buffers())])
"""


def test_what_a_loop_sees_in_a_step(world: World, tmp_path: Path) -> None:
    """Means over the micro-batches, unused parameters' gradients, random numbers, and buffers after the step."""
    script = tmp_path / "loop.py"
    script.write_text(ONCE_IN_A_STEP)
    seen = []
    for n in (1, 2, 4, 6):
        words = "--virtual-workers", "6", "--run-dir", tmp_path / str(n), script, tmp_path / f"{n}.npy"
        world.train(n, *words)
        seen.append(np.load(tmp_path / f"{n}.npy"))
        assert_same_bits(newest(tmp_path / str(n)), newest(tmp_path / "1"))
    assert all(np.array_equal(each, seen[0]) for each in seen)


def test_options_that_depend_on_the_micro_batch_are_refused(world: World, tmp_path: Path) -> None:
    script, words = tmp_path / "loop.py", ("--virtual-workers", "6", "--run-dir")
    loop = "for i, (_, (inputs, labels)) in enumerate(trainer.batches(8)):"
    change = "\n    optimizer.param_groups[0]['lr'] = 0.1 / (i + 1)"
    text = LOOP.replace("for _, (inputs, labels) in trainer.batches(8):", loop + change)
    script.write_text(text.replace("{when}", "False").replace("{action}", "pass"))
    assert "trainer.sync_gradients" in world.refusal(1, *words, tmp_path / "refused", script)


def test_a_mean_needs_every_micro_batch(world: World, tmp_path: Path) -> None:
    script, words = tmp_path / "loop.py", ("--virtual-workers", "6", "--run-dir")
    script.write_text(LOOP.replace("{when}", "trainer.sync_gradients").replace("{action}", "trainer.mean(1.0)"))
    assert "trainer.sync_gradients" in world.refusal(1, *words, tmp_path / "refused", script)


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_buffers_that_each_worker_keeps_are_those_after_the_first_pass(passes: int) -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("last", torch.zeros(1, dtype=torch.int64))
    buffers = Buffers(module, keeps_first=True)
    buffers.bind(*({name: torch.zeros_like(value) for name, value in buffers.averaged.items()} for _ in range(2)))
    for step in range(4):
        buffers.begin_step()
        for number in range(passes):
            buffers.begin_forward()
            assert module.num_batches_tracked == step and module.last == (10 * step - 9 if step else 0)
            module(torch.ones(2, 2))
            module.last = module.last * 0 + 10 * step + 1 + number
    buffers.begin_step()
    assert module.num_batches_tracked == 4 and module.last == 31
