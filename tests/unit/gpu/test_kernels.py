"""The kernels, emulated on the CPU, against the Numba forms."""

from ...support.kernel_cases import *  # noqa: F403
