"""Optimizers that update whole tensors: divided among ranks, and with their state in checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from mpitrain.core.extra_state import ExtraState, StoredState  # noqa: E402
from mpitrain.errors import CheckpointError  # noqa: E402
from mpitrain.pytorch.translation import translated  # noqa: E402
from mpitrain.pytorch.whole_tensors import TorchTensors, plain_options  # noqa: E402

from ...torch.optimizers import Counting, GlobalNorm, HalfAdam, RowNorm  # noqa: E402

MAKERS = {
    "row norm": lambda p: RowNorm(p, 0.1),
    "counting": lambda p: Counting(p, 0.1),
    "half Adam": lambda p: HalfAdam(p, 0.1),
    "global norm": lambda p: GlobalNorm(p, 0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "groups": lambda p: RowNorm([{"params": p[:1], "lr": 0.3}, {"params": p[1:], "beta": 0.2}], 0.1),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()


def grads_at(model: nn.Module, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: rng.standard_normal(parameter.shape) for name, parameter in model.named_parameters()}


def made(name: str) -> tuple[nn.Module, TorchTensors]:
    model = make_model()
    rule = translated(MAKERS[name](list(model.parameters())), model)
    assert isinstance(rule, TorchTensors)
    return model, rule


def plain(name: str, steps: int) -> list[np.ndarray]:
    """Return the parameters after steps of the optimizer alone."""
    model = make_model()
    optimizer = MAKERS[name](list(model.parameters()))
    for step in range(steps):
        for parameter, gradient in zip(model.parameters(), grads_at(model, step).values(), strict=True):
            parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    return values(model)


def values(model: nn.Module) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize("name", MAKERS)
def test_updates_are_those_of_the_optimizer_and_the_memory_stays(name: str) -> None:
    model, rule = made(name)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    rule.begin(list(grads_at(model, 0)), {})
    for step in range(4):
        rule.update_tensors(grads_at(model, step))
    assert_same(values(model), plain(name, 4))
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [len(group["params"]) for group in rule.optimizer.param_groups] == ([1, 3] if name == "groups" else [4])


@pytest.mark.parametrize("name", ["row norm", "Adafactor", "groups"])
def test_ranks_that_divide_the_tensors_resume_in_another_division(name: str) -> None:
    names = list(grads_at(make_model(), 0))

    def train(division: list[list[str]], start: int, state: ExtraState, before: list[np.ndarray]) -> Any:
        """Return the state and the parameters after two steps."""
        stored: dict[str, Any] = {}
        after = list(before)
        for own in division:
            model, rule = made(name)
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.data.copy_(torch.from_numpy(value))
            rule.begin(own, state)
            for step in range(start, start + 2):
                rule.update_tensors({key: g for key, g in grads_at(model, step).items() if key in own})
            assert set(rule.own_state()) == set(own)
            stored |= rule.tensor_state()
            for place, value in enumerate(values(model)):
                if names[place] in own:
                    after[place] = value
        return stored, after

    assert made(name)[1].can_divide()
    first = train([names[:1], names[1:3], names[3:]], 0, {}, values(make_model()))
    second = train([[names[3], names[0]], [names[1], names[2]]], 2, *first)
    assert_same(second[1], plain(name, 4))


@pytest.mark.parametrize(
    ("name", "divides"), [("counting", False), ("half Adam", False), ("global norm", False), ("row norm", True)]
)
def test_only_optimizers_that_update_tensors_separately_are_divided(name: str, divides: bool) -> None:
    assert made(name)[1].can_divide() is divides


def test_state_of_no_parameter_and_changed_options_are_restored() -> None:
    model, rule = made("counting")
    names = list(grads_at(model, 0))
    rule.begin(names, {})
    for step in range(2):
        rule.update_tensors(grads_at(model, step))
    assert rule.changed == {"k"}
    other, again = made("counting")
    other.load_state_dict(model.state_dict())
    state = StoredState(rule.tensor_state())
    again.begin(names, state)
    assert state.used == set(state) and again.changed == {"k"}
    assert again.optimizer.param_groups[0]["k"] == 2
    for step in range(2, 4):
        again.update_tensors(grads_at(other, step))
    assert_same(values(other), plain("counting", 4))


def test_a_rank_reads_the_state_of_other_ranks_without_keeping_it() -> None:
    model, rule = made("row norm")
    names = list(grads_at(model, 0))
    rule.begin(names, {})
    rule.update_tensors(grads_at(model, 0))
    state = StoredState(rule.tensor_state())
    _, other = made("row norm")
    other.begin(names[:1], state)
    assert state.used == set(state) and set(other.own_state()) == set(names[:1])


def test_the_state_of_another_optimizer_is_refused() -> None:
    model, rule = made("row norm")
    names = list(grads_at(model, 0))
    rule.begin(names, {})
    rule.update_tensors(grads_at(model, 0))
    with pytest.raises(CheckpointError, match=r"RowNorm.*HalfAdam"):
        made("half Adam")[1].begin(names, rule.tensor_state())
    numbered = TorchTensors(0.1, optimizer=rule.optimizer, parameters=rule.parameters, index=1)
    assert numbered.name == "RowNorm 1" and rule.name == "RowNorm"
    (first, *_) = rule.tensor_state()
    assert rule.stores(first) and not numbered.stores(first)


def test_parameters_without_a_gradient_and_frozen_ones_are_left_out() -> None:
    model, rule = made("row norm")
    before = values(model)
    rule.begin(list(grads_at(model, 0)), {})
    model[1].weight.requires_grad_(False)
    grads = grads_at(model, 0)
    del grads["0.weight"]
    rule.update_tensors(grads | {"unknown": np.ones(2)})
    changed = [not np.array_equal(*pair) for pair in zip(before, values(model), strict=True)]
    assert changed == [False, True, False, True]
    rule.update_tensors({})
    assert len(rule.optimizer.param_groups) == 1 and rule.optimizer.param_groups[0]["lr"] == 0.1


def test_floating_point_state_is_averaged_in_place() -> None:
    model, rule = made("half Adam")
    rule.begin(list(grads_at(model, 0)), {})
    rule.update_tensors(grads_at(model, 0))
    arrays = rule.arrays_to_average()
    assert len(arrays) == 8  # two moments of each parameter, but not its number of steps
    for array in arrays:
        array[:] = 3
    assert all(state["exp_avg"].eq(3).all() and state["step"] == 1 for state in rule.own_state().values())


def test_state_that_state_dict_has_returned_is_not_shared() -> None:
    model, rule = made("half Adam")
    names = list(grads_at(model, 0))
    rule.begin(names, {})
    rule.update_tensors(grads_at(model, 0))
    shared = rule.optimizer.state[model[0].weight]["exp_avg"]
    rule.own.discard(names[1])
    rule.keep_own_state()
    assert rule.optimizer.state[model[0].weight]["exp_avg"] is not shared
    assert set(rule.optimizer.state) == {*model.parameters()} - {model[0].bias}


def test_options_that_a_checkpoint_can_store() -> None:
    stored = {"lr": 0.1, "betas": (0.9, [1]), "n": None}
    group = {"params": [1], "param_names": ["a"], **stored, "f": len, "t": torch.ones(1)}
    assert plain_options(group) == stored
