"""The kernels, emulated on the CPU, against the Numba forms."""

from .cases import *  # noqa: F403
