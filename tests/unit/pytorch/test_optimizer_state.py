"""The state of torch's optimizers as vectors of the model's layout, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from mpitrain import optim  # noqa: E402
from mpitrain.core.layout import Layout  # noqa: E402
from mpitrain.errors import JobError  # noqa: E402
from mpitrain.pytorch.optimizer_state import has_taken_steps, set_state, slots_of, state_digest  # noqa: E402
from mpitrain.pytorch.translation import translated  # noqa: E402

from .test_translation import GROUPS, gradients, make_model  # noqa: E402

NAMES = [
    "adam",
    "adamw",
    "sgd",
    "sgd without momentum",
    "frozen",
    "amsgrad",
    "asgd",
    "nadam",
    "rmsprop",
    "rprop",
    "adagrad",
]


def layout_of(model: nn.Module) -> Layout:
    return Layout.pack([(name, tuple(value.shape), "param") for name, value in model.named_parameters()])


def stepped(name: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after some steps of torch."""
    model = make_model()
    optimizer = GROUPS[name](list(model.parameters()))
    for step in range(steps):
        for parameter, gradient in zip(model.parameters(), gradients(model, step), strict=True):
            parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    return model, optimizer


def of_torch(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        index: {key: value for key, value in values.items() if value is not None} for index, values in state.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_slots_are_those_that_the_translated_optimizer_has_after_the_same_steps(name: str) -> None:
    model, optimizer = stepped(name, 3)
    rule, layout = translated(optimizer, model), layout_of(model)
    slots, updates = slots_of(optimizer, rule, model, layout, np.float64)
    assert updates == {"sgd": 1, "sgd without momentum": 0}.get(name, 3)  # SGD does not count its steps
    initial = make_model()
    params = np.zeros(layout.size)
    for view, parameter in zip(layout.views(params).values(), initial.parameters(), strict=True):
        view[...] = parameter.detach().numpy()
    own = {slot: np.zeros(layout.size) for slot in rule.slots}
    updater = optim.Updater(rule, layout, params, own)
    for step in range(3):
        grads = np.zeros(layout.size)
        for view, gradient in zip(layout.views(grads).values(), gradients(initial, step), strict=True):
            view[...] = gradient
        updater.update_all(grads, step)
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    groups = [group for group in optimizer.param_groups if not is_sgd or group["momentum"]]
    with_state = {id(parameter) for group in groups for parameter in group["params"]}
    assert slots.keys() == own.keys()
    for slot in slots:
        for parameter, found, expected in zip(
            model.parameters(), layout.views(slots[slot]).values(), layout.views(own[slot]).values(), strict=True
        ):
            if id(parameter) in with_state:
                np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-15)
            else:
                assert not found.any()


@pytest.mark.parametrize("name", NAMES)
def test_state_is_restored_from_slots(name: str) -> None:
    model, optimizer = stepped(name, 3)
    rule, layout = translated(optimizer, model), layout_of(model)
    slots, _ = slots_of(optimizer, rule, model, layout, np.float64)
    other = GROUPS[name](list(model.parameters()))
    set_state(other, rule, model, layout, slots, 3)
    found, expected = of_torch(other), of_torch(optimizer)
    for index, values in found.items():
        before = expected.get(index, {})
        assert values.keys() == before.keys()
        for key, value in values.items():
            np.testing.assert_allclose(value, before[key], rtol=1e-12)
    for vector in slots.values():
        vector[:] = -1  # the state must be a copy
    for index, values in of_torch(other).items():
        for key, value in values.items():
            np.testing.assert_allclose(value, expected[index][key], rtol=1e-12)


def test_before_the_first_update_there_is_no_state() -> None:
    model, optimizer = stepped("adam", 0)
    rule, layout = translated(optimizer, model), layout_of(model)
    slots, updates = slots_of(optimizer, rule, model, layout, np.float64)
    assert updates == 0 and not any(vector.any() for vector in slots.values())
    set_state(optimizer, rule, model, layout, slots, 0)
    assert not optimizer.state


def test_state_of_other_options_or_steps_is_refused() -> None:
    model, optimizer = stepped("amsgrad", 2)
    rule, layout = translated(optimizer, model), layout_of(model)
    weight = optimizer.param_groups[1]["params"][0]
    optimizer.state[weight]["step"] = torch.tensor(5.0)
    with pytest.raises(JobError, match="2, 5"):
        slots_of(optimizer, rule, model, layout, np.float64)
    del optimizer.state[weight]["max_exp_avg_sq"]
    with pytest.raises(JobError, match="max_exp_avg_sq"):
        slots_of(optimizer, rule, model, layout, np.float64)
    model, optimizer = stepped("adam", 2)
    del optimizer.state[optimizer.param_groups[0]["params"][0]]
    with pytest.raises(JobError, match="0, 2"):
        slots_of(optimizer, translated(optimizer, model), model, layout, np.float64)
    model, optimizer = stepped("adam", 2)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"] = torch.zeros(2)
    with pytest.raises(JobError, match="exp_avg"):
        slots_of(optimizer, translated(optimizer, model), model, layout, np.float64)


@pytest.mark.parametrize("name", ["adam", "adagrad", "sgd", "sgd without momentum"])
def test_steps_that_were_taken(name: str) -> None:
    assert not has_taken_steps(stepped(name, 0)[1])
    assert has_taken_steps(stepped(name, 1)[1]) or name == "sgd without momentum"


def test_a_digest_of_the_state() -> None:
    digests = [state_digest(stepped("adam", steps)[1]) for steps in (0, 1, 2, 2)]
    assert digests[0] == "" and digests[2] == digests[3] and len(set(digests)) == 3
    _, optimizer = stepped("adam", 2)
    optimizer.state[optimizer.param_groups[2]["params"][-1]]["exp_avg"].view(-1)[-1] += 1e-9
    assert state_digest(optimizer) != digests[2]
    _, other = stepped("adam", 2)
    other.state[other.param_groups[0]["params"][0]]["own"] = "text"
    assert state_digest(other) not in digests
