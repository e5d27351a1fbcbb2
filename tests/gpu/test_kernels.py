"""The kernels on a GPU against the Numba forms: the comparisons of tests/unit/cuda."""

import importlib.util

import pytest

from tests.unit.cuda.cases import *  # noqa: F403


def _why_not() -> str:
    """Why there is no GPU to run on, or nothing."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    return "" if cupy.is_available() else "no NVIDIA GPU"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "-")]
