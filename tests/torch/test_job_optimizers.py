"""Jobs whose optimizer is an optimizer of torch, or a function that makes one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from mpitrain import Job, data, optim
from mpitrain.errors import JobError

SPLIT = data.from_arrays(np.zeros((8, 3), np.float32), np.zeros(8, np.int64))


def rule(optimizer: object, model: nn.Module) -> optim.Optimizer:
    return Job(model=model, loss=nn.CrossEntropyLoss(), optimizer=optimizer, train=SPLIT).rule  # type: ignore[arg-type]


def test_an_optimizer_and_a_function_give_the_same_rule() -> None:
    model = nn.Linear(3, 2)
    found = rule(torch.optim.RMSprop(model.parameters(), 0.01, alpha=0.5), model)
    assert found == rule(lambda params: torch.optim.RMSprop(params, 0.01, alpha=0.5), model)
    assert found.slots == ("square_avg",) and found.rate(0) == 0.01
    assert rule(optim.sgd(0.1), model) == optim.sgd(0.1)


@pytest.mark.parametrize("optimizer", [lambda params: None, lambda params: torch.optim.LBFGS(params), 0.1, None])
def test_anything_else_is_refused(optimizer: object) -> None:
    with pytest.raises(JobError):
        rule(optimizer, nn.Linear(3, 2))
