"""Losses of torch: shapes that differ are refused, validation and exact means count each label once, on any ranks."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset, TensorDataset

from mpitrain import Job, data, optim
from mpitrain.data.batch import Batch, IndexBatch
from mpitrain.data.permutation import order
from mpitrain.errors import ConfigError, JobError, NonFiniteLoss
from mpitrain.plan.config import RunConfig
from mpitrain.plan.modes import MODES
from mpitrain.plan.plan import make_plan
from mpitrain.pytorch.criterion import Criterion

from ..support.launch import Mpi, one_line
from ..support.world.controller import World
from . import counted, support

FILE = Path(counted.__file__)
N, C = 12, 5
BY_ELEMENT = [
    *(nn.L1Loss(), nn.MSELoss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.PoissonNLLLoss(), nn.KLDivLoss()),
    *(nn.BCEWithLogitsLoss(), nn.SoftMarginLoss(), nn.HingeEmbeddingLoss(), nn.MultiLabelSoftMarginLoss()),
    *(nn.KLDivLoss(reduction="batchmean"), functional.mse_loss, functional.l1_loss, functional.kl_div),
    *(functional.smooth_l1_loss, functional.huber_loss, functional.poisson_nll_loss, functional.soft_margin_loss),
    *(functional.binary_cross_entropy_with_logits, functional.hinge_embedding_loss),
    functools.partial(functional.huber_loss, delta=0.5),
    functools.partial(functional.multilabel_soft_margin_loss, weight=torch.rand(C)),
    nn.BCEWithLogitsLoss(weight=torch.rand(C), pos_weight=torch.rand(C)),
]
WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.0, 2.0])


def classes(*shape: int) -> Tensor:
    """Return labels of which some are ignored."""
    labels = torch.arange(N * int(np.prod(shape))).reshape(N, *shape) % C
    labels[: N // 2] = -100
    return labels


def cross_entropies() -> list[tuple[Any, Tensor, Tensor]]:
    """Return losses with outputs and labels."""
    torch.manual_seed(3)
    flat, deep = torch.randn(N, C), torch.randn(N, C, 4)
    cases: list[tuple[Any, Tensor, Tensor]] = [
        (nn.NLLLoss(WEIGHT), flat.log_softmax(1), classes()),
        (functional.nll_loss, deep.log_softmax(1), classes(4)),
        (functional.cross_entropy, flat, classes()),
        (functools.partial(functional.cross_entropy, ignore_index=1, weight=WEIGHT), flat, classes().clamp(0)),
        (nn.CrossEntropyLoss(ignore_index=255), flat, torch.where(classes() < 0, 255, classes()).to(torch.uint8)),
        (nn.CrossEntropyLoss(WEIGHT), flat, classes().clamp(0).to(torch.uint8)),
    ]
    for weight in (None, WEIGHT):
        for smoothing in (0.0, 0.1):
            loss = nn.CrossEntropyLoss(weight, label_smoothing=smoothing)
            cases += [(loss, flat, classes()), (loss, deep, classes(4)), (loss, flat, flat.flip(0).softmax(1))]
            cases.append((loss, deep, deep.flip(0).softmax(1)))
    return cases


def by_element() -> list[tuple[Any, Tensor, Tensor]]:
    return [(loss, torch.rand(N, 3, C), torch.rand(N, 3, C)) for loss in BY_ELEMENT]


@pytest.mark.parametrize("case", [*cross_entropies(), *by_element()], ids=lambda case: Criterion(case[0]).name)
def test_the_mean_is_the_total_by_the_count(case: tuple[Any, Tensor, Tensor]) -> None:
    """Means of parts, weighted by their counts, are the mean of the batch: torch's own formula."""
    loss, outputs, labels = case
    criterion = Criterion(loss)
    assert criterion.counts
    mean = loss(outputs, labels).item()
    parts = [(outputs[part], labels[part]) for part in (slice(0, 5), slice(5, 6), slice(6, N))]
    total = sum(criterion.total(*part, len(part[0])).item() for part in parts)
    count = sum(criterion.count(part[1], len(part[0])) for part in parts)
    assert total / count == pytest.approx(mean, rel=1e-5)
    assert criterion(outputs, labels).item() == mean


@dataclass
class Own:
    """A loss without a hash."""

    reduction: str = "mean"

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels).square().mean()


class Changed(nn.CrossEntropyLoss):
    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return 2 * super().forward(outputs, labels)


@pytest.mark.parametrize(
    "loss",
    [
        Own(),
        Changed(),
        lambda outputs, labels: functional.cross_entropy(outputs, labels),
        functools.partial(functional.mse_loss, reduction="sum"),
        functools.partial(functional.mse_loss, weight=torch.ones(N, C)),
        functools.partial(nn.CrossEntropyLoss()),
    ],
)
def test_other_losses_count_examples(loss: Any) -> None:
    criterion = Criterion(loss)
    assert not criterion.counts and criterion.ignore_index is None
    assert criterion.count(classes(), N) == N
    outputs = torch.randn(N, C)
    by_element = isinstance(loss, Own) or getattr(loss, "func", None) is functional.mse_loss
    labels = outputs.flip(0) if by_element else classes()
    assert criterion.total(outputs, labels, N).item() == pytest.approx(N * loss(outputs, labels).item())
    job = Job(nn.Linear(2, C), loss, optim.sgd(0.1), data.from_arrays(np.ones((N, 2)), labels.numpy()))
    with pytest.raises(ConfigError, match="--exact-mean"):
        make_plan(job, RunConfig.of(batch_size=2, train_steps=1, exact_mean=True), 1)


def regression(loss: Any, *shape: int, outputs: nn.Module | None = None) -> Job:
    """Return a job whose outputs have the shape (n, 1) unless ``outputs`` changes it."""
    model = nn.Sequential(nn.Linear(2, 1), outputs or nn.Identity())
    return Job(model, loss, optim.sgd(0.1), data.from_arrays(np.ones((N, 2)), np.ones((N, *shape))))


@pytest.mark.parametrize("loss", [nn.BCELoss(), *BY_ELEMENT], ids=lambda loss: Criterion(loss).name)
def test_losses_that_compare_elements_do_not_broadcast(loss: Any) -> None:
    for job in (regression(loss), regression(loss, 1, outputs=nn.Flatten(0)), regression(loss, 4)):
        with pytest.raises(JobError, match=r"\(2, 1\)|\(2,\)"):
            job.network.lay_out(job.train_split, np.float32)


@pytest.mark.parametrize("mode", MODES)
def test_shapes_are_checked_in_every_mode(mode: str) -> None:
    config = RunConfig.of(mode=mode, batch_size=4, train_steps=1)
    make_plan(regression(nn.MSELoss(), 1), config, 2)
    with pytest.raises(JobError):
        make_plan(regression(nn.MSELoss()), config, 2)
    wrong = regression(nn.MSELoss(), 1)
    wrong.validation = data.from_arrays(np.ones((N, 2)), np.ones(N))
    with pytest.raises(JobError):
        make_plan(wrong, config, 2)


@pytest.mark.parametrize("method", ["compute_loss", "evaluate"])
def test_shapes_are_checked_in_every_batch(method: str) -> None:
    ours = support.Local(lambda: regression(nn.MSELoss(), 1))
    with pytest.raises(JobError, match="MSELoss"):
        getattr(ours.model, method)(Batch(np.ones((4, 2)), np.ones(4), 0))


def test_a_wrong_shape_is_one_line(openmpi: Mpi, tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(
        "import numpy as np, torch\nfrom mpitrain import Job, data, optim\n\n\ndef job() -> Job:\n"
        "    split = data.from_arrays(np.ones((8, 3), np.float32), np.ones(8))\n"
        "    return Job(torch.nn.Linear(3, 1), torch.nn.MSELoss(), optim.sgd(0.1), split, batch_size=2)\n"
    )
    done = openmpi.run(2, "-m", "mpitrain", "train", file, "--run-dir", tmp_path / "run", timeout=120)
    assert done.returncode == 2 and "MSELoss" in one_line(done.stderr)


def test_a_loss_of_the_user_that_broadcasts_gets_one_notice(world: World, tmp_path: Path) -> None:
    done = world.train(2, FILE, "--own", "--batch-size", "6", "--run-dir", tmp_path, timeout=120)
    assert sum(counted.own_loss.__name__ in line for line in (done.stdout + done.stderr).splitlines()) == 1


# Validation.


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("n", "batch"), [(1, 2), (1, 48), (2, 7), (3, 5)])
def test_validation_is_the_same_for_all_batches_and_ranks(openmpi: Mpi, n: int, batch: int, tmp_path: Path) -> None:
    flags = ("--weighted", "--batch-size", batch, "--train-steps", "1", "--exact-mean", "--run-dir", tmp_path)
    done = openmpi.train(n, FILE, *map(str, flags), timeout=120)
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


def test_validation_without_a_label_that_counts_is_one_line(openmpi: Mpi, tmp_path: Path) -> None:
    flags = ("--batch-size", "6", "--exact-mean", "--validation", "none", "--run-dir", tmp_path)
    done = openmpi.run(2, "-m", "mpitrain", "train", FILE, *flags, timeout=120)
    assert done.returncode == 2 and "ignore_index" in one_line(done.stderr)


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


def test_without_it_the_mean_is_that_of_the_means(openmpi: Mpi, tmp_path: Path) -> None:
    """As in DistributedDataParallel: a rank without a label that counts makes the loss NaN."""
    flags = ("--batch-size", "4", "--run-dir", tmp_path)
    done = openmpi.run(3, "-m", "mpitrain", "train", FILE, *flags, timeout=120)
    assert done.returncode == NonFiniteLoss.exit_status and "step 1 " in one_line(done.stderr)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "sync"])
def test_the_exact_mean_needs_workers_in_step(mode: str) -> None:
    with pytest.raises(ConfigError, match="--exact-mean"):
        RunConfig.of(mode=mode, exact_mean=True)


def test_the_exact_mean_of_layers_is_their_mean() -> None:
    from mpitrain import nn as layers

    split = data.from_arrays(np.ones((N, 2)), np.ones(N, int))
    job = Job(layers.Dense(2, 3), layers.SoftmaxCrossEntropy(), optim.sgd(0.1), split)
    make_plan(job, RunConfig.of(batch_size=2, train_steps=1, exact_mean=True), 2)


def test_the_exact_mean_trains_a_compiled_loss() -> None:
    loss: Callable[..., Any] = torch.compile(nn.CrossEntropyLoss(WEIGHT), backend="eager")
    outputs = torch.randn(N, C)
    criterion = Criterion(loss)
    mean = criterion.total(outputs, classes(), N).item() / criterion.count(classes(), N)
    assert mean == pytest.approx(loss(outputs, classes()).item(), rel=1e-5)
