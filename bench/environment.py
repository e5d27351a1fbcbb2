"""Settings that benchmarks share: BLAS threads, the choice of kernels, and the import of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

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

    On some machines, ``OPENBLAS_CORETYPE`` selects older kernels for all users. This slows down only programs that use
    OpenBLAS, by 40 % on Zen 5.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in _KERNEL_CHOICES:
        os.environ.pop(name, None)


def use_this_checkout() -> None:
    """Make this process and its child processes import mpitrain from this checkout. Extends PYTHONPATH."""
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def require_gpu() -> None:
    """Print the GPU's name; exit with a one-line error if there is none. Does not use the GPU in this process."""
    if subprocess.run([sys.executable, str(ROOT / "bench" / "gpu_checks" / "device.py")], check=False).returncode:
        sys.exit(1)
