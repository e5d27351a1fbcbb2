"""Losses of torch on ranks: validation and exact means count each label once; see tests/unit/pytorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from mpitrain import Job
from mpitrain.data.batch import IndexBatch
from mpitrain.data.permutation import order

from ..support.launch import Mpi
from ..support.world.controller import World
from . import counted, support

FILE = Path(counted.__file__)


def test_a_wrong_shape_is_one_line(world: World, tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(
        "import numpy as np, torch\nfrom mpitrain import Job, data, optim\n\n\ndef job() -> Job:\n"
        "    split = data.from_arrays(np.ones((8, 3), np.float32), np.ones(8))\n"
        "    return Job(torch.nn.Linear(3, 1), torch.nn.MSELoss(), optim.sgd(0.1), split, batch_size=2)\n"
    )
    assert "MSELoss" in world.refusal(2, file, "--run-dir", tmp_path / "run", timeout=120)


def test_a_loss_of_the_user_that_broadcasts_gets_one_notice(world: World, tmp_path: Path) -> None:
    done = world.train(2, FILE, "--own", "--batch-size", "6", "--run-dir", tmp_path, timeout=120)
    assert sum(counted.own_loss.__name__ in line for line in (done.stdout + done.stderr).splitlines()) == 1


# Validation.


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("n", "batch"), [(1, 2), (1, 48), (2, 7), (3, 5)])
def test_validation_is_the_same_for_all_batches_and_ranks(
    openmpi: Mpi, world: World, n: int, batch: int, tmp_path: Path
) -> None:
    flags = ("--weighted", "--batch-size", batch, "--train-steps", "1", "--exact-mean", "--run-dir", tmp_path)
    world.train(n, FILE, *map(str, flags), timeout=120)
    (row,) = [line for line in lines(tmp_path) if "validation_loss" in line]
    stored = support.newest(tmp_path)
    model = counted.make_model()
    model.load_state_dict({name: torch.from_numpy(stored[f"params/{name}"]) for name in model.state_dict()})
    x, y = map(torch.from_numpy, counted.arrays())
    with torch.no_grad():
        outputs = model(x)
    assert row["validation_loss"] == pytest.approx(counted.make_loss(True)(outputs, y).item(), rel=1e-5)
    counts = y != -100
    assert row["validation_accuracy"] == (outputs.argmax(1) == y)[counts].sum().item() / counts.sum().item()
    if n == 2:
        done = openmpi.run(1, "-m", "mpitrain", "evaluate", tmp_path, "--json", timeout=120)
        measured = json.loads(done.stdout)
        assert measured["validation_accuracy"] == row["validation_accuracy"]
        assert measured["validation_loss"] == pytest.approx(row["validation_loss"], rel=1e-6)


def test_validation_without_a_label_that_counts_is_one_line(world: World, tmp_path: Path) -> None:
    flags = ("--batch-size", "6", "--exact-mean", "--validation", "none", "--run-dir", tmp_path)
    assert "ignore_index" in world.refusal(2, FILE, *flags, timeout=120)


# The exact mean in training.


def plain(weighted: bool) -> tuple[nn.Module, list[float]]:
    """Train on the joined batches in a plain loop; return the module and the losses."""
    torch.manual_seed(support.SEED)
    model, loss_of = counted.make_model(), counted.make_loss(weighted)
    rule = torch.optim.SGD(model.parameters(), 0.1)
    x, y = map(torch.from_numpy, counted.arrays())
    losses = []
    for step, ignored in enumerate(counted.IGNORED):
        chosen = order(step * counted.TOTAL, counted.TOTAL, len(x), support.SEED, None)
        if ignored == counted.TOTAL:  # torch's loss and gradient are NaN
            losses.append(0.0)
            continue
        loss = loss_of(model(x[chosen]), y[chosen])
        rule.zero_grad()
        loss.backward()
        rule.step()
        losses.append(loss.item())
    return model, losses


def assert_same(values: dict[str, np.ndarray], model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(values[name], value.numpy(), atol=1e-6, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(("n", "parts"), [(1, 1), (2, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("weighted", [False, True])
def test_ranks_train_as_plain_torch_on_the_joined_batch(
    world: World, n: int, parts: int, weighted: bool, tmp_path: Path
) -> None:
    words = ["--exact-mean", "--batch-size", counted.TOTAL // n, "--accumulate-steps", parts, "--log-steps", 1]
    world.train(n, FILE, *map(str, words), *["--weighted"] * weighted, "--run-dir", tmp_path, timeout=120)
    model, losses = plain(weighted)
    stored = support.newest(tmp_path)
    assert_same({name: stored[f"params/{name}"] for name in model.state_dict()}, model)
    reported = [line["loss"] for line in lines(tmp_path) if "loss" in line]
    assert reported == pytest.approx(losses, rel=1e-5)


class Indices:
    """Makes batches of examples that are on the device."""

    def __init__(self, count: int) -> None:
        self.count = count

    def batch(self, position: int, count: int) -> IndexBatch:
        return IndexBatch(order(position, count, self.count, support.SEED, None), None, position)


@pytest.mark.parametrize(("parts", "devices"), [(1, 1), (3, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("kind", ["arrays", "dataset", "cached"])
def test_replicas_and_micro_batches_share_the_exact_mean(kind: str, parts: int, devices: int) -> None:
    def make() -> Job:
        job = counted.job(weighted=True)
        if kind == "dataset":
            job.train = Subset(TensorDataset(*map(torch.from_numpy, counted.arrays())), range(len(job.train)))
        return job

    ours = support.Local(
        make,
        batch_size=counted.TOTAL,
        accumulate_steps=parts,
        devices_per_rank=devices,
        dtype="float32",
        exact_mean=True,
    )
    if kind == "cached":  # as on a GPU that has room for the data
        ours.model.cache_dataset(*counted.arrays())
        ours.loader = Indices(len(counted.arrays()[1]))
    losses = ours.train(len(counted.IGNORED))
    model, expected = plain(weighted=True)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_same(ours.state(), model)


def test_synchronized_statistics_work_without_labels_that_count(world: World, tmp_path: Path) -> None:
    """Every rank takes part in the sums of the backward pass, also if none of its labels counts."""
    flags = ("--exact-mean", "--normalize", "--batch-size", "4", "--run-dir", tmp_path)
    world.train(3, FILE, *flags, timeout=120)
    assert all(np.isfinite(value).all() for name, value in support.newest(tmp_path).items() if "params/" in name)


def test_without_it_the_mean_is_that_of_the_means(world: World, tmp_path: Path) -> None:
    """As in DistributedDataParallel: a rank without a label that counts makes the loss NaN."""
    flags = ("--batch-size", "4", "--run-dir", tmp_path)
    assert "the loss is nan" in (message := world.refusal(3, FILE, *flags, timeout=120)) and "step 1 " in message
