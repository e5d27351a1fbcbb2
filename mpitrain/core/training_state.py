"""The state that may change between two steps, in addition to the flat vectors."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from .layout import Array, Layout


class TrainingState:
    """State that the model and the strategy of a rank share. Each rank has its own state, made by ``training``. Local.

    Args:
        frozen: Names of the parameters that are not trained at first.

    Attributes:
        frozen: Shape (number of the layout's entries,), uint8: 1 for an entry that is not trained for now. The model
            sets it in ``Model.load_params``, before it computes a gradient. The strategy ignores the gradients of
            frozen entries. If all workers take the same steps, it is the same on all of them.
        loss_scale: Shape (1,), float64, on the device: factor of the loss's gradient; None for 1. The strategy sets it
            before the model is made, and changes its value on the device.
    """

    def __init__(self, layout: Layout, frozen: Collection[str] = ()) -> None:
        self.frozen: Array = np.array([entry.name in frozen for entry in layout.entries], np.uint8)
        self.loss_scale: Array | None = None
