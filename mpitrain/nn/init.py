"""Initializers of parameters: functions of a random generator and a shape.

Each output depends on ``fan_in`` inputs, and each input affects ``fan_out`` outputs. Fans are defined for a matrix
(in, out) or a convolution's weight (height, width, in, out).
"""

from __future__ import annotations

import math

import numpy as np

from ..core.layout import Array, Shape
from .layer import Initializer


def fans(shape: Shape) -> tuple[int, int]:
    """Return ``(fan_in, fan_out)`` of a weight whose last two axes are inputs and outputs."""
    if len(shape) < 2:
        size = math.prod(shape)
        return size, size
    window = math.prod(shape[:-2])
    return window * shape[-2], window * shape[-1]


def zeros(rng: np.random.Generator, shape: Shape) -> Array:
    """Return zeros."""
    return np.zeros(shape)


def ones(rng: np.random.Generator, shape: Shape) -> Array:
    """Return ones."""
    return np.ones(shape)


def constant(value: float) -> Initializer:
    """Return an initializer that sets all elements to ``value``."""

    def constant_value(rng: np.random.Generator, shape: Shape) -> Array:
        return np.full(shape, value, dtype=np.float64)

    return constant_value


def glorot_uniform(rng: np.random.Generator, shape: Shape) -> Array:
    """Sample a uniform distribution with variance 2 / (fan_in + fan_out).

    Glorot and Bengio, Understanding the difficulty of training deep feedforward neural networks, AISTATS
    2010, equation 16.
    """
    limit = math.sqrt(6 / sum(fans(shape)))
    return rng.uniform(-limit, limit, shape)


def glorot_normal(rng: np.random.Generator, shape: Shape) -> Array:
    """Sample a normal distribution with variance 2 / (fan_in + fan_out); see ``glorot_uniform``."""
    return rng.normal(0, math.sqrt(2 / sum(fans(shape))), shape)


def he_uniform(rng: np.random.Generator, shape: Shape) -> Array:
    """Sample a uniform distribution with variance 2 / fan_in; see ``he_normal``."""
    limit = math.sqrt(6 / fans(shape)[0])
    return rng.uniform(-limit, limit, shape)


def he_normal(rng: np.random.Generator, shape: Shape) -> Array:
    """Sample a normal distribution with variance 2 / fan_in, which keeps the variance through layers of ReLU.

    He, Zhang, Ren and Sun, Delving deep into rectifiers, ICCV 2015, equation 10.
    """
    return rng.normal(0, math.sqrt(2 / fans(shape)[0]), shape)


def truncated_normal(stddev: float) -> Initializer:
    """Return an initializer for a normal distribution with mean 0, truncated at two ``stddev`` by resampling."""

    def truncated(rng: np.random.Generator, shape: Shape) -> Array:
        values = rng.standard_normal(math.prod(shape))
        outside = np.flatnonzero(np.abs(values) > 2)
        while outside.size:
            values[outside] = rng.standard_normal(outside.size)
            outside = outside[np.abs(values[outside]) > 2]
        return (stddev * values).reshape(shape)

    return truncated
