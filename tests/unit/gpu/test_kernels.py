"""The kernels, emulated on the CPU, compared with the Numba kernels."""

from ...support.kernel_cases_dense import *  # noqa: F403
from ...support.kernel_cases_layers import *  # noqa: F403
from ...support.kernel_cases_update import *  # noqa: F403
