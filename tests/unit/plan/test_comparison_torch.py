"""What learners compare of losses and optimizers of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from mpitrain import Job, data, optim  # noqa: E402
from mpitrain.plan.config import RunConfig  # noqa: E402
from mpitrain.plan.plan import make_plan  # noqa: E402
from mpitrain.pytorch.translation import GroupRate, translated  # noqa: E402
from mpitrain.training.join import _facts  # noqa: E402

SPLIT = data.from_arrays(np.zeros((8, 3), np.float32), np.zeros(8, np.int64))


class Own(nn.Module):
    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(weight=torch.tensor([1.0, gamma]))

    def forward(self, outputs: Any, labels: Any) -> Any:
        return self.inner(outputs, labels)


def of_model(model: nn.Linear, weight: float) -> Callable[[Any, Any], Any]:
    """Return a loss with the parameters of a model, which are not compared: they may be trained already."""
    return lambda outputs, labels: model.weight.sum() * weight


def facts(loss: Any, optimizer: Any = None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    rule = optim.sgd(0.1) if optimizer is None else optimizer(model)
    job = Job(model, loss, rule, SPLIT, batch_size=2)
    return dict(_facts(job, make_plan(job, job.completed(RunConfig.of(join=Path("run"))), 1)))


def different(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if first[name] != second[name]]


def enclosing(value: Any, x: float) -> Any:
    return lambda outputs, labels: nn.functional.cross_entropy(outputs, labels) * x + (value is None)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: nn.CrossEntropyLoss(label_smoothing=x),
        lambda x: nn.CrossEntropyLoss(weight=torch.tensor([x, 1.0])),
        Own,
        lambda x: torch.compile(Own(x), backend="eager"),
        lambda x: lambda outputs, labels: nn.functional.cross_entropy(outputs, labels) * x,
        lambda x: functools.partial(nn.functional.cross_entropy, label_smoothing=x),
        lambda x: of_model(nn.Linear(3, 2), x),
        lambda x: enclosing(torch.eye(2).to_sparse(), x),
        lambda x: enclosing(np.array([[1], [2, 3]], object), x),
    ],
    ids=range(9),
)
def test_losses_differ_by_their_values(make: Callable[[float], Any]) -> None:
    assert not different(facts(make(0.5)), facts(make(0.5)))
    assert different(facts(make(0.5)), facts(make(0.25))) == ["loss"]


def rates(lr: float, last: float = 0.5, trained: bool = False) -> Callable[[nn.Linear], Any]:
    """Return the optimizer of a Trainer, with a scheduler that begins at 0."""

    def make(model: nn.Linear) -> Any:
        optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": last}], lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        if trained:
            optimizer.step()
            scheduler.step()
        return translated(optimizer, model, [GroupRate(optimizer, index) for index in range(2)])

    return make


@pytest.mark.parametrize("other", [rates(0.1, 0.4), rates(0.2)], ids=["second", "first"])
def test_rates_of_groups_that_a_scheduler_changes(other: Any) -> None:
    loss = nn.CrossEntropyLoss()
    assert not different(facts(loss, rates(0.1)), facts(loss, rates(0.1, trained=True)))
    assert different(facts(loss, rates(0.1)), facts(loss, other)) == ["learning rates"]
