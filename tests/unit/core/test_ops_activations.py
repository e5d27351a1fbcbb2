"""The table of activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.core import ops
from mpitrain.core.ops.activations import ACTIVATIONS
from mpitrain.gpu import sources


def buffer(tag: str, shape: Any) -> np.ndarray:
    return np.empty(shape)


@pytest.mark.parametrize("in_place", [False, True])
def test_unknown_kinds_are_errors(in_place: bool) -> None:
    x = np.ones(3)
    with pytest.raises(ValueError, match="swish"):
        ops.activate(x, "swish", 0.0, in_place, buffer)
    with pytest.raises(ValueError, match="swish"):
        ops.activate_backward(x, "swish", 0.0, x)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_backward_is_the_derivative_of_forward(kind: str) -> None:
    x, step = np.linspace(-2, 2, 8).reshape(2, 4), 1e-6

    def value(at: np.ndarray) -> np.ndarray:
        return ops.activate(at, kind, 0.1, False, buffer)[0].copy()

    dy = np.ones_like(x)
    ops.activate_backward(ops.activate(x.copy(), kind, 0.1, False, buffer)[1], kind, 0.1, dy)
    np.testing.assert_allclose(dy, (value(x + step) - value(x - step)) / (2 * step), rtol=1e-6, atol=1e-8)


def test_the_gpu_numbers_the_kinds_in_this_order() -> None:
    listed = sources.source("activation").partition("{")[2].partition("}")[0].split(", ")
    assert [name.strip().lower() for name in listed] == ["k" + kind.replace("_", "") for kind in ACTIVATIONS]
