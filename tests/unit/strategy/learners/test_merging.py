"""How the work of several learners is merged."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.core.layout import Layout
from mpitrain.strategy.learners.merging import Contribution, Fragment, fragments_of, outer_gradient

LAYOUT = Layout.pack([("a", (40, 10), "param"), ("b", (3,), "param"), ("c", (100,), "param"), ("mean", (5,), "state")])


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_every_tensor_is_in_one_fragment(count: int) -> None:
    fragments = fragments_of(LAYOUT, count)
    assert len(fragments) <= min(count, 4) and (fragments[0].lo, fragments[-1].hi) == (0, LAYOUT.size)
    assert [entry for fragment in fragments for entry in fragment.entries] == list(LAYOUT.entries)
    for fragment in fragments:
        assert all(fragment.lo <= entry.start and entry.stop <= fragment.hi for entry in fragment.entries)


def _merged(*contributions: Contribution) -> dict[str, np.ndarray]:
    whole = Fragment(0, LAYOUT.size, LAYOUT.entries)
    return LAYOUT.views(outer_gradient(whole, LAYOUT.n_trained, contributions))


def _delta(seed: int) -> np.ndarray:
    delta = np.random.default_rng(seed).normal(size=LAYOUT.size)
    delta[LAYOUT.gaps()] = 0
    return delta


def test_one_contribution_is_its_own_mean() -> None:
    delta = _delta(1)
    merged = _merged(Contribution(delta, 100, 10, 3))
    for name, values in LAYOUT.views(delta).items():
        np.testing.assert_allclose(merged[name], -values if name == "mean" else values)


@pytest.mark.parametrize("second", [Contribution(_delta(2), 100, 10, 0), Contribution(_delta(2), 300, 10, 1)])
def test_contributions_are_averaged_by_their_weights(second: Contribution) -> None:
    first = Contribution(_delta(1), 100, 10, 0)
    weights = np.array([1000.0, second.examples**2 / 10 / (1 + second.age)])
    weights /= weights.sum()
    merged, one, two = _merged(first, second), LAYOUT.views(first.delta), LAYOUT.views(second.delta)
    for name, values in merged.items():
        expected = weights[0] * one[name] + weights[1] * two[name]
        np.testing.assert_allclose(values, -expected if name == "mean" else expected)
