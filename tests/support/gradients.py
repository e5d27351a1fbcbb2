"""Binds a single layer to vectors of its own, and compares its gradients with central differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpitrain import nn
from mpitrain.core.layout import Array, Layout, Shape
from mpitrain.nn.layer import Layer


def bound(layer: Layer, shape: Shape, dtype: type = np.float64, seed: int = 0) -> tuple[Layout, Array, Array]:
    """Build and initialize ``layer``; return its layout, parameters and gradients, which start as NaN."""
    layout = nn.layout_of(layer, shape, dtype)
    params, grads = np.empty(layout.size, dtype), np.full(layout.size, np.nan, dtype)
    nn.bind(layer, layout, params, grads)
    nn.initialize(layer, layout, params, seed)
    return layout, params, grads


def difference(function: Callable[[], float], at: Array, step: float = 1e-5) -> Array:
    """Return the central differences of ``function`` for every element of ``at``, which ``function`` reads."""
    slope = np.empty(at.shape)
    for i in np.ndindex(at.shape):
        value = at[i]
        at[i] = value + step
        above = function()
        at[i] = value - step
        below = function()
        at[i] = value
        slope[i] = (above - below) / (2 * step)
    return slope


def check_gradients(layer: Layer, shape: Shape, batch: int = 3, ctx: nn.Context | None = None) -> None:
    """Compare the results of ``backward`` with central differences of a random linear function of the outputs."""
    ctx = nn.Context(training=True, weight=1 / batch) if ctx is None else ctx
    layer.needs_dx = True
    layout, params, grads = bound(layer, shape)
    rng = np.random.default_rng(1)
    params += rng.normal(0, 0.1, params.shape)
    x = rng.standard_normal((batch, *shape))
    probe = rng.standard_normal(layer.forward(x, ctx).shape)

    def objective() -> float:
        return float(np.sum(probe * layer.forward(x, ctx)))

    objective()
    dx = layer.backward(probe.copy())
    assert dx is not None
    dx, slopes = dx.copy(), grads.copy()
    np.testing.assert_allclose(dx, difference(objective, x), rtol=1e-5, atol=1e-7, err_msg="x")
    for entry in layout.entries:
        if entry.kind == "param":
            part = slice(entry.start, entry.stop)
            expected = difference(objective, params[part])
            np.testing.assert_allclose(slopes[part], expected, rtol=1e-5, atol=1e-7, err_msg=entry.name)
