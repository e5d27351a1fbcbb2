"""A shard in this process's memory: the effect of one gradient on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import optim
from mpitrain.comm.backoff import Backoff
from mpitrain.core.layout import Array, Layout
from mpitrain.optim import Updater
from mpitrain.strategy.ps.shard import Push, Shard

from ....support.own_memory import OwnMemory

LAYOUT = Layout.pack([("weight", (30, 4), "param"), ("bias", (4,), "param")])
STALENESS = 4


def shard_of(optimizer: optim.Optimizer) -> tuple[Shard, Array]:
    rng = np.random.default_rng(0)
    vectors = {name: np.zeros(LAYOUT.size) for name in ("params", *optimizer.slots)}
    for view in LAYOUT.views(vectors["params"]).values():
        view[...] = rng.standard_normal(view.shape)
    slots = {name: vectors[name] for name in optimizer.slots}
    updater, frozen = Updater(optimizer, LAYOUT, vectors["params"], slots, None, None), np.zeros(1, np.uint8)
    waiting = Backoff(oversubscribed=False)
    shard = Shard(OwnMemory(), [(0, LAYOUT.size)], updater, vectors, frozen, waiting)  # type: ignore[arg-type]
    shard.open(STALENESS)
    return shard, vectors["params"]


def gradient() -> Array:
    found = np.zeros(LAYOUT.size)
    for view in LAYOUT.views(found).values():
        view[...] = np.random.default_rng(1).standard_normal(view.shape)
    return found


@pytest.mark.parametrize("kind", [optim.sgd, optim.momentum, optim.adam, optim.lamb, optim.lars])
def test_a_stale_gradient_moves_the_parameters_by_a_part(kind: Any) -> None:
    """Scaling has the effect of dividing the learning rate by the staleness."""
    stale, moved = shard_of(kind(0.4))
    assert stale.apply(gradient(), Push(version=0, scaled=True)) == STALENESS
    fresh, expected = shard_of(kind(0.4 / STALENESS))
    assert fresh.apply(gradient(), Push(version=STALENESS, scaled=True)) == 0
    np.testing.assert_allclose(moved, expected, rtol=1e-12)
    whole, further = shard_of(kind(0.4))
    whole.apply(gradient(), Push(version=0))
    assert np.abs(further - expected).max() > 1e-3, "a gradient that is not scaled has the whole effect"


def test_a_version_is_counted_for_every_update_and_every_step_left_out() -> None:
    shard, params = shard_of(optim.sgd(0.1))
    before = params.copy()
    shard.skip_step()
    assert (shard.version, np.array_equal(params, before)) == (STALENESS + 1, True)
    shard.apply(gradient(), Push(STALENESS + 1))
    assert (shard.version, np.array_equal(params, before)) == (STALENESS + 2, False)
