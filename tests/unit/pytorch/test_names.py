"""Names of parameters and buffers, also of shared ones and of compiled modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from mpitrain.pytorch.names import aliases_of, parameters_of, plain_name  # noqa: E402


class Compiled(nn.Module):
    """Has the names of a module that ``torch.compile`` has wrapped."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def shared() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model.append(model[2])
    return model


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0.weight", "0.weight"),
        ("_orig_mod.0.weight", "0.weight"),
        ("0._orig_mod.1._orig_mod.bias", "0.1.bias"),
        ("0._orig_mod", "0"),
        ("_orig_mod", ""),
        ("", ""),
    ],
)
def test_plain_names(name: str, expected: str) -> None:
    assert plain_name(name) == expected


@pytest.mark.parametrize("wrap", [lambda model: model, Compiled], ids=["module", "compiled"])
def test_shared_tensors_have_one_name_and_aliases(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(shared())
    named = dict(parameters_of(model))
    assert list(named) == ["0.weight", "0.bias", "1.bias", "2.weight", "2.bias"]
    assert [*named.values()] == [*model.parameters()]
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    expected = {f"3.{name}": f"2.{name}" for name in ("weight", "bias", *buffers)}
    assert aliases_of(model) == {"1.weight": "0.weight", **expected}


def test_a_part_that_is_compiled_has_the_names_of_the_part() -> None:
    model = nn.Sequential(Compiled(nn.Linear(1, 1)), nn.Linear(1, 1))
    assert [name for name, _ in parameters_of(model)] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    model.append(model[0]._orig_mod)
    assert aliases_of(model) == {"2.weight": "0.weight", "2.bias": "0.bias"}
