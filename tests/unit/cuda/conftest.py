"""The emulated device, built once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mpitrain.gpu
from mpitrain.gpu.ops import grid

from .cases import Device
from .emulated import EmulatedKernels, build

KERNELS = Path(mpitrain.gpu.__file__).parent / "kernels"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, compiled for the CPU."""
    return build(tmp_path_factory.mktemp("emulated"), sorted(KERNELS.glob("*.cu")))


def _put(array: np.ndarray, shift: int) -> np.ndarray:
    there = np.empty(array.size + shift, array.dtype)[shift:].reshape(array.shape)
    there[...] = array
    return there


@pytest.fixture(scope="session", params=[grid.BLOCKS, 3], ids=["wide", "narrow"])
def device(library: Path, request: pytest.FixtureRequest) -> Iterator[Device]:
    """Runs everything in both orders: what depends on one of them is a race.

    On a grid of three blocks threads loop many times, as on a GPU they do only over arrays that are too large here.
    """
    places = [EmulatedKernels(library), EmulatedKernels(library, is_reversed=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "BLOCKS", request.param)
        yield Device(places, _put, np.array)
