"""The emulated device, built once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mpitrain.gpu.ops import grid

from ...support.emulation.kernels import EmulatedKernels, put
from ...support.kernel_device import Device


@pytest.fixture(scope="session", params=[grid.BLOCKS, 3], ids=["wide", "narrow"])
def device(library: Path, request: pytest.FixtureRequest) -> Iterator[Device]:
    """Runs everything in both orders: what depends on one of them is a race.

    On a grid of three blocks threads loop many times, as on a GPU they do only over arrays that are too large here.
    """
    places = [EmulatedKernels(library), EmulatedKernels(library, is_reversed=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "BLOCKS", request.param)
        yield Device(places, put, np.array)
