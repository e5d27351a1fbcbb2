"""Dropout."""

from __future__ import annotations

import numpy as np

from ..kernels import kernel
from ..layout import Array

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, SplitMix64's step


@kernel
def _mix(z: np.uint64) -> np.uint64:
    """Scramble 64 bits: the output function of SplitMix64.

    Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014, figure 16.
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@kernel
def drop(x: Array, y: Array, seed: np.uint64, layer: np.uint64, position: int, below: np.uint64, scale: float) -> None:
    """Set ``y = x * scale`` for elements whose 32 random bits are below ``below``, else 0; shape (batch, elements).

    Each example has its own SplitMix64 stream, whose start is a hash of (seed, layer, position of the example).
    """
    factor, zero = x.dtype.type(scale), x.dtype.type(0)
    stream = _mix(_mix(seed + _GAMMA) + layer + _GAMMA)
    for i in range(x.shape[0]):
        start = _mix(stream + np.uint64(position) + np.uint64(i) + _GAMMA)
        for j in range(x.shape[1]):
            bits = _mix(start + np.uint64(j + 1) * _GAMMA) >> np.uint64(32)
            y[i, j] = x[i, j] * factor if bits < below else zero
