"""Decides on the device whether a step updates the parameters, and adapts the loss scale of float16.

Small gradients underflow in float16. The loss's gradient is therefore multiplied by a scale (Micikevicius et al., Mixed
precision training, ICLR 2018, section 3.2). An overflow skips the step and halves the scale; many good steps double it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.extra_state import ExtraState, Versioned, values_of
from ..core.layout import Array
from ..errors import CheckpointError
from .device import Gpu
from .ops import updates

_FIRST_SCALE = 65536.0
_NAMESPACE, _VERSION = "loss_scale", 1  # namespace and version of this part of the extra state


class GradScaler:
    """The state that controls updates on one GPU. Only reading and loading the extra state wait for the device.

    Use within ``gpu.activate()``.

    Args:
        scaled: Whether to scale the loss.
        nan: The policy for a loss that is not finite; see ``--nan``.

    Attributes:
        state: Shape (UPDATED + 1,), float64, on the device; see ``updates.decide_update``.
        scale: Shape (1,), float64, on the device: factor of the loss's gradient; None for 1.
        results: View of ``state``: this worker's share of the loss, the total, and whether there was an update.
    """

    def __init__(self, gpu: Gpu, scaled: bool, nan: str) -> None:
        self._gpu, self._scaled, self._nan = gpu, scaled, nan
        state = np.zeros(updates.UPDATED + 1)
        state[updates.FACTOR] = state[updates.SCALE] = 1.0
        if scaled:
            state[updates.SCALE] = _FIRST_SCALE
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

    def accepts(self) -> bool:
        """Return the decision; waits for the device."""
        state = np.empty(self.state.size)
        self._gpu.download(self.state, state)
        return bool(state[updates.GO])

    def load_extra_state(self, extra_state: ExtraState) -> None:
        """Continue with the loss scale of a resumed run, if it had one. Call it before the first step."""
        saved = values_of(extra_state, _NAMESPACE, _VERSION)
        if self._scaled and saved:
            state = np.empty(self.state.size)
            self._gpu.download(self.state, state)
            state[updates.SCALE], state[updates.GOOD] = _number(saved, "scale"), _number(saved, "steps")
            self._gpu.upload(state, self.state)

    def extra_state(self) -> ExtraState:
        """Return the loss scale for a checkpoint, empty if the loss is not scaled; waits for the device."""
        if not self._scaled:
            return {}
        state = np.empty(self.state.size)
        self._gpu.download(self.state, state)
        values = {"scale": float(state[updates.SCALE]), "steps": float(state[updates.GOOD])}
        return {_NAMESPACE: Versioned(_VERSION, values)}


def _number(saved: Mapping[str, Any], name: str) -> float:
    value = saved.get(name)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise CheckpointError(
            f"the checkpoint's state loss_scale has {name} {value!r}, not a number; "
            f"use another checkpoint, or --init-from",
            on_all_ranks=True,
        )
    return value
