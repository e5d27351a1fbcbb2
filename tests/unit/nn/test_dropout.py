"""Dropout masks: they depend on seed, layer and position, but not on how examples are divided into batches."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import nn

FEATURES = 333


def masks(
    batch: int, rate: float = 0.5, index: int = 0, shape: tuple[int, ...] = (FEATURES,), **ctx: int
) -> np.ndarray:
    """Return the mask of a batch: True for each element that is kept."""
    dropout = nn.Dropout(rate)
    dropout.index = index
    y = dropout.forward(np.ones((batch, *shape), np.float32), nn.Context(training=True, **ctx))
    np.testing.assert_array_equal(np.unique(y), np.float32([0, 1 / (1 - rate)]))
    return y > 0


@pytest.mark.parametrize("parts", [(1,) * 7, (3, 4), (5, 1, 1)])
def test_an_examples_mask_does_not_depend_on_the_batch_it_comes_in(parts):
    whole = masks(7, position=20)
    starts = np.cumsum((0, *parts))
    split = [masks(n, position=20 + int(start)) for n, start in zip(parts, starts, strict=False)]
    np.testing.assert_array_equal(np.concatenate(split), whole)


def test_the_examples_shape_does_not_matter():
    flat = masks(3, shape=(24,))
    np.testing.assert_array_equal(masks(3, shape=(2, 3, 4)).reshape(3, 24), flat)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_rate_is_met_over_all_and_at_each_element(rate):
    kept = masks(3000, rate)
    n = kept.size
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / n)
    spread = np.sqrt(rate * (1 - rate) / len(kept))
    assert np.abs(kept.mean(axis=0) - (1 - rate)).max() < 5 * spread


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"seed": 2**63}, {"seed": -1}, {"index": 1}, {"position": 1}, {"position": 60_000}], ids=str
)
def test_masks_of_another_seed_layer_or_position_are_independent(other):
    first, second = masks(100), masks(100, **other)
    n = first.size
    assert abs((first & second).mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / n)


def test_neighbouring_layers_and_examples_do_not_share_shifted_masks():
    """The random numbers of one layer or example must not be those of another from a later place on."""
    rows = np.concatenate([masks(20, index=i, seed=s) for i in range(3) for s in range(3)]) * 2.0 - 1
    for shift in range(-40, 41):
        shifted = np.roll(rows, shift, axis=1)
        agreement = rows @ shifted.T / FEATURES
        if shift == 0:
            np.fill_diagonal(agreement, 0)
        assert np.abs(agreement).max() < 7 / np.sqrt(FEATURES)


def test_backward_passes_gradients_where_forward_passed_values():
    dropout = nn.Dropout(0.3)
    dropout.dtype = np.dtype(np.float64)
    y = dropout.forward(np.ones((5, FEATURES)), nn.Context(training=True, seed=4, position=9)).copy()
    np.testing.assert_array_equal(dropout.backward(np.full(y.shape, 2.0)), 2 * y)


def test_validation_passes_everything():
    dropout = nn.Dropout(0.9)
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    np.testing.assert_array_equal(dropout.forward(x, nn.Context()), x)
    np.testing.assert_array_equal(dropout.backward(x), x)
