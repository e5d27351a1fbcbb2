"""Evaluation mode for a time; each part has its own mode afterwards."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from mpitrain.pytorch.modes import evaluating, inference  # noqa: E402


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("context", [evaluating, inference])
def test_the_modes_of_all_parts_are_restored(context: object) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(1)))
    model[1][1].eval()
    before = modes(model)
    with context(model):  # type: ignore[operator]
        assert not any(modes(model)) and torch.is_grad_enabled() == (context is evaluating)
    assert modes(model) == before == [True, True, True, True, False] and torch.is_grad_enabled()
    model.eval()
    model[1][0].train()
    with pytest.raises(ArithmeticError), context(model):  # type: ignore[operator]
        raise ArithmeticError
    assert modes(model) == [False, False, False, True, False]
