"""What every benchmark sets for all that it starts, so that each side runs as its makers meant it to."""

from __future__ import annotations

import os

_KERNEL_CHOICES = (
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
)


def one_thread_and_own_kernels() -> None:
    """Give BLAS one thread a rank, and every library the kernels that it chooses itself for this processor.

    Some machines pin OpenBLAS to older kernels for all users (``OPENBLAS_CORETYPE``): that slows only the sides that
    use OpenBLAS, and on Zen 5 by 40 %.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in _KERNEL_CHOICES:
        os.environ.pop(name, None)
