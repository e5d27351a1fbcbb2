"""Optimizers of torch with parameter groups: the mpitrain optimizers that replace them take the same steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from mpitrain import optim  # noqa: E402
from mpitrain.core.layout import Layout  # noqa: E402
from mpitrain.errors import JobError  # noqa: E402
from mpitrain.pytorch.translation import GroupRate, translated  # noqa: E402

from ...torch.loops import SCHEDULERS  # noqa: E402

STEPS = 20
MakeGroups = Callable[[Any], torch.optim.Optimizer]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3)).double()


def gradients(model: nn.Module, step: int) -> list[np.ndarray]:
    rng = np.random.default_rng(step + 1)
    return [rng.standard_normal(parameter.shape) for parameter in model.parameters()]


def steps_of_torch(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> list[np.ndarray]:
    """Return the parameters after all steps."""
    for step in range(STEPS):
        for parameter, gradient in zip(model.parameters(), gradients(model, step), strict=True):
            parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def steps_of_translation(model: nn.Module, optimizer: optim.Optimizer, scheduler: Any = None) -> list[np.ndarray]:
    """Return the parameters after all steps."""
    layout = Layout.pack([(name, tuple(value.shape), "param") for name, value in model.named_parameters()])
    params, slots = np.zeros(layout.size), {name: np.zeros(layout.size) for name in optimizer.slots}
    for name, view in layout.views(params).items():
        view[...] = dict(model.named_parameters())[name].detach().numpy()
    updater = optim.Updater(optimizer, layout, params, slots)
    for step in range(STEPS):
        grads = np.zeros(layout.size)
        for view, gradient in zip(layout.views(grads).values(), gradients(model, step), strict=True):
            view[...] = gradient
        updater.update_all(grads, step)
        if scheduler is not None:
            scheduler.step()
    return list(layout.views(params).values())


GROUPS: dict[str, MakeGroups] = {
    "adam": lambda p: torch.optim.Adam(
        [
            {"params": p[:2], "lr": 0.002, "weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-3},
            {"params": p[2:4], "betas": (0.5, 0.9)},
            {"params": p[4:], "weight_decay": 0.1, "eps": 1e-5},
        ],
        0.01,
    ),
    "adamw": lambda p: torch.optim.AdamW(
        [{"params": p[::2], "lr": 0.02, "weight_decay": 0.3, "eps": 1e-3}, {"params": p[1::2], "betas": (0.5, 0.9)}],
        0.01,
        weight_decay=0.1,
    ),
    "decoupled in one group": lambda p: torch.optim.Adam(
        [{"params": p[:3], "decoupled_weight_decay": True}, {"params": p[3:]}], 0.01, weight_decay=0.2
    ),
    "weight decay": lambda p: torch.optim.AdamW(
        [{"params": p[:1], "weight_decay": 0.0}, {"params": p[1:4]}, {"params": p[4:], "weight_decay": 0.5}], 0.01
    ),
    "sgd": lambda p: torch.optim.SGD(
        [
            {"params": p[:1], "lr": 0.05, "weight_decay": 0.2},
            {"params": p[1:3], "momentum": 0.9, "nesterov": True},
            {"params": p[3:], "momentum": 0.5, "weight_decay": 0.1},
        ],
        0.1,
    ),
    "sgd without momentum": lambda p: torch.optim.SGD(
        [{"params": p[:3], "weight_decay": 0.2}, {"params": p[3:], "weight_decay": 0.1, "lr": 0.2}], 0.1
    ),
    "frozen": lambda p: torch.optim.Adam([{"params": p[:2], "betas": (0.5, 0.9)}, {"params": p[3:]}], 0.01),
    # For these optimizers, mpitrain calls their own ``step``.
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1, initial_accumulator_value=0.3),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "amsgrad": lambda p: torch.optim.Adam(
        [{"params": p[:1]}, {"params": p[1:], "amsgrad": True, "weight_decay": 0.1}], 0.01
    ),
    "asgd": lambda p: torch.optim.ASGD(p, 0.05, t0=5),
    "dampening": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.2),
    "maximize": lambda p: torch.optim.AdamW(p, 0.01, maximize=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda p: torch.optim.RAdam(p, 0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(
        [{"params": p[:2], "momentum": 0.5, "lr": 0.02}, {"params": p[2:4], "centered": True}, {"params": p[5:]}], 0.01
    ),
    "rprop": lambda p: torch.optim.Rprop(p[1:], 0.01),
}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("scheduler_name", ["none", *SCHEDULERS])
def test_groups_take_the_steps_of_torch(name: str, scheduler_name: str) -> None:
    model, other = make_model(), make_model()
    optimizer = GROUPS[name](list(model.parameters()))
    scheduler = None if scheduler_name == "none" else SCHEDULERS[scheduler_name](optimizer)
    live = [GroupRate(optimizer, index) for index in range(len(optimizer.param_groups))]
    translation = translated(optimizer, model, live)
    found = steps_of_translation(other, translation, scheduler)
    optimizer = GROUPS[name](list(model.parameters()))
    scheduler = None if scheduler_name == "none" else SCHEDULERS[scheduler_name](optimizer)
    for ours, theirs in zip(found, steps_of_torch(model, optimizer, scheduler), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_groups_that_differ_in_rate_and_whether_they_decay_are_updated_together() -> None:
    model = make_model()
    p = list(model.parameters())
    groups = [{"params": p[:2], "lr": 0.1, "weight_decay": 0.0}, {"params": p[2:]}]
    translation = translated(torch.optim.AdamW(groups, 0.01, weight_decay=0.1), model)
    assert {name for options in translation.groups.values() for name in options} == {"learning_rate"}
    assert translation.weight_decay == 0.1
    assert [translation.decays(name) for name, _ in model.named_parameters()] == [False, False, True, True, True, True]


@pytest.mark.parametrize("name", ["adadelta", "asgd", "nadam", "rprop", "rmsprop"])
def test_the_result_does_not_depend_on_how_the_vectors_are_split(name: str) -> None:
    model = make_model()
    rule = translated(GROUPS[name](list(model.parameters())), model)
    layout = Layout.pack([(name, tuple(value.shape), "param") for name, value in model.named_parameters()])
    rows, found = np.zeros((3, 1, layout.size)), []
    for step, row in enumerate(rows):
        for view, gradient in zip(layout.views(row[0]).values(), gradients(model, step), strict=True):
            view[...] = gradient
    for bounds in ([0, layout.size], [0, 5, 40, layout.size]):
        params, slots = np.zeros(layout.size), {slot: np.zeros(layout.size) for slot in rule.slots}
        updater = optim.Updater(rule, layout, params, slots)
        for step, row in enumerate(rows):
            for lo, hi in pairwise(bounds):
                updater.update(lo, hi, row, step)
        found.append(np.concatenate([view.reshape(-1) for view in layout.views(params).values()]))
    assert found[0].any()  # torch rounds the elements at the end of a vector differently
    np.testing.assert_allclose(*found, rtol=1e-13, atol=1e-13)


def test_a_parameter_that_is_trained_later_begins_with_the_optimizers_initial_state() -> None:
    params, gradient = np.ones(4), np.ones((1, 4))
    for kind, slot in ((torch.optim.Rprop, "step_size"), (torch.optim.Adagrad, "sum")):
        model = nn.Linear(4, 1, bias=False).double()
        rule = translated(
            kind(model.parameters(), 0.1, **({"initial_accumulator_value": 0.5} if slot == "sum" else {})), model
        )
        slots = {name: np.zeros(4) for name in rule.slots}
        optim.Updater(rule, Layout.pack([("weight", (1, 4), "param")]), params.copy(), slots).update(0, 4, gradient, 7)
        assert (slots[slot] >= (0.1 if slot == "step_size" else 0.5)).all()


class Wrapping(torch.optim.Optimizer):
    """Wraps another optimizer."""

    def __init__(self, params: Any) -> None:
        self.base = torch.optim.SGD(params, 0.1)
        super().__init__(params, {"lr": 0.1})


@pytest.mark.parametrize("make", [lambda p: torch.optim.LBFGS(p), lambda p: torch.optim.SparseAdam(p), Wrapping])
def test_optimizers_that_need_something_else_are_refused(make: MakeGroups) -> None:
    model = make_model()
    with pytest.raises(JobError):
        translated(make(list(model.parameters())), model)
