"""The state that ``programs/together.py`` saves, for the tests that read it."""

from __future__ import annotations

import numpy as np

from mpitrain.core.extra_state import ExtraState, Versioned
from mpitrain.core.layout import Layout

SHAPES = {"scalar": (), "one": (1,), "matrix": (23, 7), "cube": (2, 3, 5), "long": (7001, 3)}
LAYOUT = Layout.pack([(name, shape, "param") for name, shape in SHAPES.items()])


def extra_state(step: int) -> ExtraState:
    return {"loss_scale": Versioned(1, {"scale": step + 0.5})}


def state(step: int) -> dict[str, np.ndarray]:
    """Return flat vectors, shape (LAYOUT.size,), float32; 170 kB in all."""
    return {name: np.arange(LAYOUT.size, dtype=np.float32) * step + k for k, name in enumerate(("params", "momentum"))}
