"""Momentum that workers apply, because servers receive few elements of each gradient.

A worker sends the largest elements of its accumulated gradients. If the server applied momentum to the received
elements, an element would lack the momentum of all steps in which it was not sent. Therefore the worker accumulates
velocities in place of gradients, and the server applies the received elements without momentum. The velocity of an
element that was sent is reset, because it points in a direction that is out of date. (Lin, Han, Mao, Wang and Dally,
Deep gradient compression, ICLR 2018, sections 3.1 and 3.2: momentum correction, momentum factor masking.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.kernels import kernel
from ...core.layout import Array, Layout
from ...core.ranges import Range
from ...plan.plan import Momentum


class WorkerMomentum:
    """The velocity of a worker's gradients. Local.

    Args:
        momentum: The factor of the velocity, and its kind.
        residual: Shape (size,): values not yet sent to servers on other nodes; zero where an element was sent.
        remote: The ranges that are sent to servers on other nodes.
        layout: The layout of the vectors; layer state that is not trained has no velocity.

    Attributes:
        velocity: Shape (layout.size,).
    """

    def __init__(
        self, momentum: Momentum, residual: Array, remote: Sequence[Range], layout: Layout, dtype: Any
    ) -> None:
        self._momentum, self._residual, self._n_trained = momentum, residual, layout.n_trained
        self._remote = [(lo, min(hi, layout.n_trained)) for lo, hi in remote if lo < layout.n_trained]
        self.velocity = np.zeros(layout.size, dtype)

    def apply(self, grads: Array, clip: float) -> None:
        """Replace the gradients, scaled by ``clip``, with the update before its scaling by the learning rate."""
        for lo, hi in self._remote:
            _mask(self.velocity[lo:hi], self._residual[lo:hi])
        velocity, trained = self.velocity[: self._n_trained], grads[: self._n_trained]
        _accelerate(velocity, trained, self._momentum.factor, clip, self._momentum.nesterov)


@kernel
def _mask(velocity: Array, residual: Array) -> None:
    zero = velocity.dtype.type(0)
    for i in range(velocity.size):
        velocity[i] = zero if residual[i] == zero else velocity[i]


@kernel
def _accelerate(velocity: Array, grads: Array, factor: float, clip: float, nesterov: bool) -> None:
    kept, scale = grads.dtype.type(factor), grads.dtype.type(clip)
    ahead, own = (kept, scale) if nesterov else (grads.dtype.type(1), grads.dtype.type(0))
    for i in range(grads.size):
        velocity[i] = kept * velocity[i] + scale * grads[i]
        grads[i] = own * grads[i] + ahead * velocity[i]
