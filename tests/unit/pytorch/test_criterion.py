"""Losses of torch: what they are a mean over, and shapes that differ."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from mpitrain import Job, data, optim  # noqa: E402
from mpitrain.data.batch import Batch  # noqa: E402
from mpitrain.errors import ConfigError, JobError  # noqa: E402
from mpitrain.plan.config import RunConfig  # noqa: E402
from mpitrain.plan.modes import MODES  # noqa: E402
from mpitrain.plan.plan import make_plan  # noqa: E402
from mpitrain.pytorch import criterion  # noqa: E402
from mpitrain.pytorch.criterion import Criterion  # noqa: E402

from ...torch import support  # noqa: E402

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


@pytest.mark.parametrize(
    ("outputs", "labels", "noted"),
    [((4, 1), (4,), True), ((4,), (4, 1), True), ((4,), (4,), False), ((1, 1), (1,), False), ((4, 2), (4,), False)],
)
def test_a_loss_of_the_user_that_may_broadcast_is_noted_once(
    outputs: tuple[int, ...], labels: tuple[int, ...], noted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    criterion._log_once.cache_clear()
    caplog.set_level("INFO")
    for loss in (Own(), Own(), nn.MSELoss()):
        Criterion(loss).note_broadcast(torch.zeros(outputs), torch.zeros(labels))
    assert [record.args[0].count("Own") for record in caplog.records] == [1] * noted  # type: ignore[index,union-attr]


def test_the_shapes_of_the_notice_are_those_of_the_loss() -> None:
    with pytest.raises(JobError) as error:
        Criterion(nn.MSELoss())(torch.zeros(4, 1), torch.zeros(4))
    assert all(text in str(error.value) for text in ("(4, 1)", "(4,)", "nn.Flatten(0)"))


def test_a_label_that_is_no_class_is_left_to_the_loss() -> None:
    loss = nn.CrossEntropyLoss(WEIGHT)
    assert Criterion(loss).count(torch.tensor([0, C]), 2) > 0
    with pytest.raises(IndexError):
        Criterion(loss)(torch.zeros(2, C), torch.tensor([0, C]))
