"""Parameters in bfloat16 as rounded copies of float32 values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from mpitrain.pytorch.bfloat16 import Bfloat16Copies, is_copied, to_array, to_bfloat16  # noqa: E402

BETWEEN = 1.0 + 2.0**-9  # float32, but no number of bfloat16


def made(model: nn.Module) -> tuple[Bfloat16Copies, dict[str, Tensor]]:
    names, params = zip(*model.named_parameters(), strict=True)
    values = {name: torch.full(parameter.shape, BETWEEN) for name, parameter in model.named_parameters()}
    copies = Bfloat16Copies(names, params)
    copies.bind(values)
    return copies, values


def test_only_parameters_in_bfloat16_are_copies() -> None:
    model = nn.Sequential(nn.Linear(2, 3).bfloat16(), nn.Linear(3, 2))
    before = model[1].weight.clone()
    copies, _ = made(model)
    assert copies.names == ["0.weight", "0.bias"] and [is_copied(p) for p in model.parameters()] == [
        True,
        True,
        False,
        False,
    ]
    assert model[0].weight.eq(1).all() and model[0].weight.dtype == torch.bfloat16
    assert torch.equal(model[1].weight, before)


def test_values_are_rounded_and_changes_of_the_copies_are_stored() -> None:
    model = nn.Linear(2, 2).bfloat16()
    copies, values = made(model)
    values["weight"][0, 0] = 7.0
    copies.load()
    assert model.weight.tolist() == [[7, 1], [1, 1]]
    with torch.no_grad():
        model.weight[1, 1] = 0.5
    copies.store_params()
    assert values["weight"].tolist() == [[7, BETWEEN], [BETWEEN, 0.5]]  # what was not changed keeps its precision
    assert values["bias"].tolist() == [BETWEEN, BETWEEN]


def test_autograd_does_not_record_a_load() -> None:
    model = nn.Linear(2, 2).bfloat16()
    copies, _ = made(model)
    version, loss = model.weight._version, model(torch.ones(1, 2).bfloat16()).sum()
    copies.load()
    loss.backward()
    assert model.weight._version == version and model.weight.is_leaf and model.weight.grad.eq(1).all()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_change_of_the_recorded_element_is_named(name: str) -> None:
    class WithEmpty(nn.Linear):
        """Has a parameter without elements."""

        def __init__(self) -> None:
            super().__init__(2, 2)
            self.empty = nn.Parameter(torch.zeros(0))

    model = WithEmpty().bfloat16()
    copies, _ = made(model)
    copies.record()
    assert copies.changed() is None
    with torch.no_grad():
        getattr(model, name).view(-1)[0] = -1.0
    assert copies.changed() == name
    copies.record()
    assert copies.changed() is None


def test_no_copies() -> None:
    copies, _ = made(nn.Linear(1, 1))
    copies.load()
    copies.store_params()
    copies.record()
    assert copies.names == [] and copies.changed() is None


def test_trees_and_arrays() -> None:
    tree = to_bfloat16({"a": [torch.tensor([BETWEEN]), torch.tensor([3])], "b": "text"})
    assert [part.dtype for part in tree["a"]] == [torch.bfloat16, torch.int64] and tree["b"] == "text"
    cases: list[tuple[Any, Any]] = [(torch.bfloat16, np.float32), (torch.float64, np.float64), (torch.int8, np.int8)]
    for dtype, expected in cases:
        array = to_array(torch.ones(2, dtype=dtype).requires_grad_(dtype.is_floating_point))
        assert array.dtype == expected and array.tolist() == [1, 1]
