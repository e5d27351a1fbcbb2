"""The kernels, emulated on the CPU, against the Numba forms."""

from ...support.kernel_cases_dense import *  # noqa: F403
from ...support.kernel_cases_layers import *  # noqa: F403
from ...support.kernel_cases_update import *  # noqa: F403
