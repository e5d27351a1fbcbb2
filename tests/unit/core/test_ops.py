"""The CPU and GPUs have the same operations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.core import ops as cpu_ops
from mpitrain.gpu import ops as gpu_ops
from mpitrain.gpu.ops import grid, updates


def operations(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the module's public functions, except the helpers in ``grid`` and the operations of optimizers."""
    found = {
        name: inspect.unwrap(value)
        for name, value in vars(module).items()
        if not name.startswith("_") and inspect.isfunction(inspect.unwrap(value))
    }
    helpers = {name for name, value in found.items() if value.__module__ in (grid.__name__, updates.__name__)}
    return {name: value for name, value in found.items() if name not in helpers}


def test_both_modules_have_the_same_operations() -> None:
    assert set(operations(cpu_ops)) == set(operations(gpu_ops)) >= {"activate", "max_pool", "softmax_gradient"}


@pytest.mark.parametrize("name", sorted(operations(cpu_ops)))
def test_signatures_are_equal(name: str) -> None:
    parameters = [
        [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]
        for function in (operations(cpu_ops)[name], operations(gpu_ops)[name])
    ]
    assert parameters[0] == parameters[1]


def test_an_operation_of_one_module_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "another", lambda x: None, raising=False)
    assert set(operations(cpu_ops)) != set(operations(gpu_ops))


def test_a_layer_keeps_nothing_of_a_container_that_it_was_in_before() -> None:
    """A layer applies the activation that follows it; in another container, this may be another activation."""
    dense, relu, tanh = nn.Dense(3, 4), nn.ReLU(), nn.Tanh()
    x = np.random.default_rng(0).standard_normal((5, 3))
    outputs = {}
    for layers in ((dense, relu), (dense,), (dense, tanh), (relu, dense)):
        model = nn.Sequential(*layers)
        layout = nn.layout_of(model, (3,), np.float64)
        params, grads = np.random.default_rng(1).standard_normal((2, layout.size))
        nn.bind(model, layout, params, grads)
        outputs[layers] = model.forward(x, nn.Context()).copy()
    z = outputs[dense,]
    assert (z < 0).any()
    np.testing.assert_array_equal(outputs[dense, relu], np.maximum(z, 0))
    np.testing.assert_array_equal(outputs[dense, tanh], np.tanh(z))
    np.testing.assert_allclose(outputs[relu, dense], np.maximum(x, 0) @ dense.weight + dense.bias)
