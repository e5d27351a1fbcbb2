"""The kernels on a GPU compared with the Numba kernels: the comparisons of tests/unit/gpu."""

import importlib.util

import pytest

if importlib.util.find_spec("cupy") is None:
    pytest.skip("CuPy is not installed", allow_module_level=True)

import cupy

if not cupy.is_available():
    pytest.skip("no NVIDIA GPU", allow_module_level=True)

from ..support.kernel_cases_dense import *  # noqa: F403
from ..support.kernel_cases_layers import *  # noqa: F403
from ..support.kernel_cases_update import *  # noqa: F403

pytestmark = pytest.mark.gpu
