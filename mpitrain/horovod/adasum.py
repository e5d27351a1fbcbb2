"""Adasum: a combination of gradients that is their mean if they are parallel, and their sum if they are orthogonal.

Maleki et al., Scaling Distributed Training with Adaptive Summation (MLSys 2021). Two vectors a and b give

    a (1 - a.b / 2 |a|^2) + b (1 - a.b / 2 |b|^2)

More vectors are combined in a binary tree. If a and b are the results of m and n ranks, the factors 1 / 2 are replaced
by m / (m + n) and n / (m + n). Parallel vectors of any number of ranks then give their mean. For a power of two ranks,
this is Adasum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def combine(parts: Sequence[Tensor]) -> Tensor:
    """Return the combination of the ranks' vectors, each of shape (n,), in float64. Local."""
    level = [(part.double(), 1) for part in parts]
    while len(level) > 1:
        pairs = [_pair(*level[at : at + 2]) for at in range(0, len(level) - 1, 2)]
        level = pairs + level[2 * len(pairs) :]
    return level[0][0]


def _pair(left: tuple[Tensor, int], right: tuple[Tensor, int]) -> tuple[Tensor, int]:
    (a, m), (b, n) = left, right
    product = float(torch.dot(a, b))
    result = a * _factor(product, a, m / (m + n)) + b * _factor(product, b, n / (m + n))
    return result, m + n


def _factor(product: float, vector: Tensor, share: float) -> float:
    square = float(torch.dot(vector, vector))
    return 1.0 - share * product / square if square > 0 else 1.0
