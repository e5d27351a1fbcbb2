"""Memory of one process in place of memory that the ranks of a node share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from mpitrain.core.layout import Array


class OwnMemory:
    """Memory of a node with ``size`` ranks; the test acts as each rank in turn."""

    def __init__(self, size: int = 1) -> None:
        self.node = SimpleNamespace(size=size, rank=0, allgather=lambda value: [value] * size)

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.zeros(shape, dtype)
