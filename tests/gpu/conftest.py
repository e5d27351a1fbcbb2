"""The GPU of this machine, if it has one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..support.kernel_device import Device


@pytest.fixture(scope="session")
def device() -> Device:
    """Runs everything twice on the GPU: results must not depend on timing."""
    import cupy

    from mpitrain.gpu.nvrtc import CupyKernels

    def put(array: np.ndarray, shift: int) -> Any:
        there = cupy.empty(array.size + shift, array.dtype)[shift:].reshape(array.shape)
        there.set(np.ascontiguousarray(array))
        return there

    place = CupyKernels()
    return Device([place, place], put, cupy.asnumpy)
