"""Initial values: their range and variance for the fans of matrices and convolutions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.nn.init import fans


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), (1, 1)), ((7,), (7, 7)), ((784, 100), (784, 100)), ((3, 5, 16, 32), (240, 480)), ((1, 1, 4, 1), (4, 1))],
)
def test_fans_count_what_an_output_sees_and_an_input_reaches(shape, expected):
    assert fans(shape) == expected


@pytest.mark.parametrize("shape", [(400, 100), (5, 5, 16, 100)])
@pytest.mark.parametrize(
    ("init", "variance"),
    [
        (nn.glorot_uniform, lambda fan_in, fan_out: 2 / (fan_in + fan_out)),
        (nn.glorot_normal, lambda fan_in, fan_out: 2 / (fan_in + fan_out)),
        (nn.he_uniform, lambda fan_in, fan_out: 2 / fan_in),
        (nn.he_normal, lambda fan_in, fan_out: 2 / fan_in),
    ],
)
def test_the_variance_is_that_of_the_paper(init, variance, shape):
    values = init(np.random.default_rng(0), shape)
    assert values.shape == shape
    assert abs(values.mean()) < 5 * math.sqrt(variance(*fans(shape)) / values.size)
    assert values.var() == pytest.approx(variance(*fans(shape)), rel=0.05)
    if init in (nn.glorot_uniform, nn.he_uniform):
        assert np.abs(values).max() <= math.sqrt(3 * variance(*fans(shape)))


def test_a_truncated_normal_ends_at_two_standard_deviations():
    values = nn.truncated_normal(0.1)(np.random.default_rng(0), (300, 200))
    assert 0.19 < np.abs(values).max() <= 0.2
    assert values.std() == pytest.approx(0.1 * 0.8796, rel=0.02)  # deviation of the truncated normal: sqrt(0.7737)


@pytest.mark.parametrize(
    ("init", "value"), [(nn.zeros, 0), (nn.ones, 1), (nn.constant(-2.5), -2.5), (nn.constant(3), 3)]
)
def test_constants_fill_the_shape(init, value):
    np.testing.assert_array_equal(init(np.random.default_rng(0), (2, 3)), np.full((2, 3), value))


@pytest.mark.parametrize(
    "init", [nn.glorot_uniform, nn.glorot_normal, nn.he_uniform, nn.he_normal, nn.truncated_normal(1)]
)
def test_values_are_a_function_of_the_generator(init):
    first, again, other = (init(np.random.default_rng(seed), (3, 4)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()
