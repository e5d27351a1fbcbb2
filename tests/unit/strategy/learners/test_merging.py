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
def test_norm_and_direction_are_averaged_separately(second: Contribution) -> None:
    first = Contribution(_delta(1), 100, 10, 0)
    weights = np.array([1000.0, second.examples**2 / 10 / (1 + second.age)])
    weights /= weights.sum()
    merged, one, two = _merged(first, second), LAYOUT.views(first.delta), LAYOUT.views(second.delta)
    for name in "abc":
        norms = [np.linalg.norm(one[name]), np.linalg.norm(two[name])]
        direction = weights[0] * one[name] / norms[0] + weights[1] * two[name] / norms[1]
        expected = weights @ norms * direction / np.linalg.norm(direction)
        np.testing.assert_allclose(merged[name], expected)
    np.testing.assert_allclose(merged["mean"], -(weights[0] * one["mean"] + weights[1] * two["mean"]))


def test_opposite_and_empty_contributions_have_no_direction() -> None:
    delta, zero = _delta(1), np.zeros(LAYOUT.size)
    for pair in ((delta, -delta), (zero, zero)):
        merged = _merged(*(Contribution(values, 100, 10, 0) for values in pair))
        assert all(not values.any() for values in merged.values())
    half = _merged(Contribution(delta, 100, 10, 0), Contribution(zero, 100, 10, 0))
    np.testing.assert_allclose(half["c"], LAYOUT.views(delta)["c"] / 2)
