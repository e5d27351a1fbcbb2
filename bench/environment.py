"""The environment of all benchmarks, in which every program runs with its own defaults."""

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
    """Set one BLAS thread per rank, and let every library choose its kernels for this CPU.

    Some machines set OpenBLAS to older kernels for all users (``OPENBLAS_CORETYPE``), which slows down only programs
    that use OpenBLAS, by 40 % on Zen 5.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in _KERNEL_CHOICES:
        os.environ.pop(name, None)
