"""Momentum on workers: the velocity of elements that have not been sent."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.core.layout import Layout
from mpitrain.plan.plan import Momentum
from mpitrain.strategy.ps.worker_momentum import WorkerMomentum


@pytest.mark.parametrize("nesterov", [False, True])
def test_velocity_is_kept_where_nothing_was_sent(nesterov: bool) -> None:
    """Elements 0 to 3 are sent to another node; 4 and 5 are applied on this node; 16 and 17 are not trained."""
    rng, residual = np.random.default_rng(0), np.zeros(4)
    layout = Layout.pack([("weight", (6,), "param"), ("mean", (2,), "state")])
    momentum = WorkerMomentum(Momentum(0.9, nesterov), residual, [(0, 4)], layout, np.float64)
    velocity = np.zeros(6)
    for step in range(5):
        grads = rng.standard_normal(6)
        unsent = np.append(residual != 0, [True, True])
        velocity = 0.9 * np.where(unsent, velocity, 0) + 0.5 * grads
        expected = 0.5 * grads + 0.9 * velocity if nesterov else velocity
        found = np.ones(layout.size)
        found[:6] = grads
        momentum.apply(found, 0.5)
        np.testing.assert_allclose(found[:6], expected, rtol=1e-14)
        np.testing.assert_allclose(momentum.velocity[:6], velocity, rtol=1e-14)
        assert (found[16:18] == 1).all()
        residual[:] = np.where((np.arange(4) + step) % 3 == 0, 0, 1.0)
