"""Several optimizers for one model: each updates its own parameters, and gets its own state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from mpitrain.errors import JobError  # noqa: E402
from mpitrain.pytorch.live_optimizer import live_optimizer  # noqa: E402
from mpitrain.pytorch.several_optimizers import SeveralOptimizers, as_one  # noqa: E402

from ...torch.optimizers import GlobalNorm, two_adams  # noqa: E402
from .test_live_optimizer import Owner  # noqa: E402
from .test_whole_tensors import assert_same, grads_at, make_model, values  # noqa: E402


def made(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> SeveralOptimizers:
    lives = [live_optimizer(each, model, None, None, Owner(), index) for index, each in enumerate(optimizers)]
    return as_one(lives, model)


def plain(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> list[np.ndarray]:
    for step in range(steps):
        for parameter, gradient in zip(model.parameters(), grads_at(model, step).values(), strict=True):
            parameter.grad = torch.from_numpy(gradient)
        for optimizer in optimizers:
            optimizer.step()
    return values(model)


def test_each_updates_its_parameters_and_resumes_with_its_state() -> None:
    model = make_model()
    rule = made(model, two_adams(model))
    names = list(grads_at(model, 0))
    rule.begin(names, {})
    for step in range(2):
        rule.update_tensors(grads_at(model, step))
    assert rule.name == "Adam 0, Adam 1" and rule.can_divide() and len(rule.arrays_to_average()) == 8
    state, other = rule.tensor_state(), make_model()
    assert len(state) == 4
    other.load_state_dict(model.state_dict())
    again = made(other, two_adams(other))
    again.begin(names, state)
    assert [set(member.own_state()) for member in again.members] == [set(names[:2]), set(names[2:])]
    for step in range(2, 4):
        again.update_tensors(grads_at(other, step))
    expected = make_model()
    assert_same(values(other), plain(expected, two_adams(expected), 4))


def test_all_members_must_divide_tensors() -> None:
    model = make_model()
    first, second = model
    optimizers: list[Any] = [torch.optim.SGD(first.parameters(), 0.1), GlobalNorm(second.parameters(), 0.1)]
    assert not made(model, optimizers).can_divide()


def test_a_parameter_has_one_optimizer() -> None:
    model = make_model()
    first, second = two_adams(model)
    second.add_param_group({"params": [model[0].bias]})
    with pytest.raises(JobError, match=r"0\.bias.*Adam 0.*Adam 1"):
        made(model, [first, second])
