"""The emulated device, built once per session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mpitrain.gpu.ops import grid

from ...simulators.emulation.kernels import EmulatedKernels, put
from ...support.kernel_device import Device


@pytest.fixture(scope="session", params=[grid.SUM_BLOCKS, 3], ids=["wide", "narrow"])
def device(library: Path, request: pytest.FixtureRequest) -> Iterator[Device]:
    """Two devices that must agree; the second device runs blocks and threads in reverse order, to find races.

    It also runs only three blocks at once, so that threads loop many times, as they do on a GPU over large arrays.
    """
    places = [EmulatedKernels(library), EmulatedKernels(library, is_reversed=True, resident=3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "SUM_BLOCKS", request.param)
        yield Device(places, put, np.array)
