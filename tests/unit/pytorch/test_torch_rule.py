"""Optimizers of torch on parts of flat vectors, against the optimizer itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mpitrain.pytorch.torch_rule import ELEMENTWISE, TorchRule, options_of, state_of  # noqa: E402

N, STEPS = 7, 6
# Options in which an optimizer has the most state.
OPTIONS: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    torch.optim.Adagrad: {"initial_accumulator_value": 0.3, "lr_decay": 0.1},
    torch.optim.Adam: {"amsgrad": True},
    torch.optim.AdamW: {"amsgrad": True},
    torch.optim.ASGD: {"t0": 3},
    torch.optim.RMSprop: {"momentum": 0.5, "centered": True},
    torch.optim.SGD: {"momentum": 0.9, "dampening": 0.2},
}


def made(kind: Any) -> tuple[torch.nn.Parameter, torch.optim.Optimizer, TorchRule]:
    """Return a parameter of ones, its optimizer, and the rule with the same options."""
    parameter = torch.nn.Parameter(torch.ones(N, dtype=torch.float64))
    optimizer = kind([parameter], lr=0.1, **OPTIONS.get(kind, {}))
    options = options_of(optimizer, optimizer.param_groups[0])
    vectors, numbers = state_of(kind, options)
    return (
        parameter,
        optimizer,
        TorchRule(0.1, kind=kind, options=options, vectors=vectors, numbers=numbers, slots=(*vectors, *numbers)),
    )


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("parts", [[(0, N)], [(0, 2), (2, N)]], ids=["whole", "parts"])
def test_updates_are_those_of_torch(kind: Any, parts: list[tuple[int, int]]) -> None:
    parameter, optimizer, rule = made(kind)
    params, slots = np.ones(N), {name: np.zeros(N) for name in rule.slots}
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        gradient, rate = rng.standard_normal(N), 0.1 / (step + 1)
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        for lo, hi in parts:
            rule.update(params[lo:hi], gradient[lo:hi], {name: v[lo:hi] for name, v in slots.items()}, rate, step)
        np.testing.assert_allclose(params, parameter.detach().numpy(), rtol=1e-12)
    for name, slot in slots.items():
        expected = optimizer.state[parameter][name]
        np.testing.assert_allclose(slot, np.broadcast_to(np.asarray(expected), N), rtol=1e-12)
    assert rule.name == kind.__name__


def test_the_names_of_the_state() -> None:
    assert state_of(torch.optim.Adam, {"amsgrad": True}) == (("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ())
    assert state_of(torch.optim.SGD, {"momentum": 0.0}) == ((), ())
    assert state_of(torch.optim.SGD, {"momentum": 0.5}) == (("momentum_buffer",), ())
    assert state_of(torch.optim.NAdam, {}) == (("exp_avg", "exp_avg_sq"), ("mu_product",))
    assert state_of(torch.optim.ASGD, {}) == (("ax",), ("eta", "mu"))


def test_a_number_is_found_although_some_elements_are_zero() -> None:
    """Gaps between parameters are zero after a resume."""
    _, _, rule = made(torch.optim.NAdam)
    found = []
    for gap in (False, True):
        params, slots = np.ones(N), {name: np.full(N, 0.5) for name in rule.slots}
        if gap:
            slots["mu_product"][:3] = 0
        rule.update(params, np.ones(N), slots, 0.1, 4)
        found.append(params)
        assert len(set(slots["mu_product"])) == 1
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("kind", "slot", "initial"), [(torch.optim.Rprop, "step_size", 0.1), (torch.optim.Adagrad, "sum", 0.3)]
)
def test_elements_that_are_trained_later_begin_with_the_initial_state(kind: Any, slot: str, initial: float) -> None:
    _, _, rule = made(kind)
    params, slots = np.ones(N), {name: np.zeros(N) for name in rule.slots}
    slots[slot][0] = 2.0
    rule.update(params, np.zeros(N), slots, 0.1, 9)
    assert slots[slot].tolist() == [2.0, *[initial] * (N - 1)]


def test_options_without_the_rate_the_implementation_and_keys_of_schedulers() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], 0.1, foreach=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    (group,) = optimizer.param_groups
    assert {"initial_lr", "foreach"} <= group.keys()
    found = options_of(optimizer, group)
    assert {"lr", "initial_lr", "params", "foreach", "fused", "capturable"}.isdisjoint(found)
    assert found["betas"] == (0.9, 0.999) and found["amsgrad"] is False
