"""The common part of the models on one GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..core.layout import Array
from ..gpu.device import Gpu
from .base import Model


class GpuModel(Model):
    """Computes on one GPU, with the bound vectors there or in host memory. A subclass sets the attributes."""

    _gpu: Gpu
    _on_host: bool  # whether the bound vectors are in host memory; ``bind`` sets it

    def add_loss(self, total: Any, loss: Any) -> Any:
        # A copy: the device's result is valid only until the next micro-batch.
        return super().add_loss(total, loss) if self._on_host else total + loss

    def activate(self) -> AbstractContextManager[object]:
        return self._gpu.activate()

    def to_host(self, vector: Array) -> Array:
        if self._on_host:
            return vector
        host = np.empty(vector.shape, vector.dtype)
        with self._gpu.activate():
            self._gpu.download(vector, host)
        return host

    def close(self) -> None:
        with self._gpu.activate():
            self._gpu.compute.wait()
        super().close()
