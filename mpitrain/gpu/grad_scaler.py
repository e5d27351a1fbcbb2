"""Decides on the device whether a step updates the parameters, and adapts the loss scale of float16.

Small gradients underflow in float16, so the loss's gradient is multiplied by a scale (Micikevicius et al., Mixed
precision training, ICLR 2018, section 3.2). An overflow skips the step and halves the scale; many good steps double it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.layout import Array
from ..errors import CheckpointError
from ..plan.progress import ExtraState
from .device import Gpu
from .ops import updates

_FIRST_SCALE = 65536.0
_SCALE, _GOOD = "loss_scale", "loss_scale_steps"  # keys in checkpoints


class GradScaler:
    """The state that controls updates on one GPU. Nothing waits for the device, except ``extra_state``.

    Use within ``gpu.activate()``.

    Args:
        scaled: Whether to scale the loss.
        nan: The policy for a loss that is not finite; see ``--nan``.
        extra_state: Of the resumed run; may contain its loss scale.

    Attributes:
        state: Shape (UPDATED + 1,), float64, on the device; see ``updates.decide_update``.
        scale: Shape (1,), float64, on the device: factor of the loss's gradient; None for 1.
        results: View of ``state``: this worker's share of the loss, the total, and whether there was an update.
    """

    def __init__(self, gpu: Gpu, scaled: bool, nan: str, extra_state: ExtraState) -> None:
        self._gpu, self._scaled, self._nan = gpu, scaled, nan
        state = np.zeros(updates.UPDATED + 1)
        state[updates.FACTOR] = state[updates.SCALE] = 1.0
        if scaled:
            state[updates.SCALE] = _number(extra_state, _SCALE, _FIRST_SCALE)
            state[updates.GOOD] = _number(extra_state, _GOOD, 0)
        self.state = gpu.copy_of(state)
        self.scale = self.state[updates.SCALE : updates.SCALE + 1] if scaled else None
        self.results = self.state[updates.OWN : updates.UPDATED + 1]

    def decide(self, grads: Array, own_loss: Array, total: Array) -> None:
        """Decide whether the step's update is applied, and by which factor; adapt the scale.

        Args:
            grads: Shape (layout.size,): the sum over the workers.
            own_loss, total: Shape (1,): this worker's share of the loss, and the sum over the workers.
        """
        if self._scaled:
            updates.find_overflow(grads, self.state[updates.OVERFLOW : updates.OVERFLOW + 1])
        updates.decide_update(own_loss, total, self._nan, self._scaled, self.state)

    def extra_state(self) -> dict[str, float]:
        """Return what a checkpoint stores; waits for the device."""
        if not self._scaled:
            return {}
        state = np.empty(self.state.size)
        self._gpu.download(self.state, state)
        return {_SCALE: float(state[updates.SCALE]), _GOOD: float(state[updates.GOOD])}


def _number(extra_state: ExtraState, name: str, default: float) -> float:
    value: Any = extra_state.get(name, default)
    if isinstance(value, str) or not math.isfinite(value):
        raise CheckpointError(f"the checkpoint's {name} is {value!r}, not a number; use another one, or --init-from")
    return value
