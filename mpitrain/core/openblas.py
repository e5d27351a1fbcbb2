"""Override the kernels that OpenBLAS chooses, if they are not the fastest. Runs before NumPy is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

_ZEN_4 = ("vendor_id\t: AuthenticAMD", "cpu family\t: 25", " avx512f ")

CHOSEN: dict[str, str] = {}  #: Environment variables that this module has set, valid for this host's CPU.


def choose_kernels(environ: MutableMapping[str, str], cpuinfo: str) -> None:
    """Make OpenBLAS use its AVX2 kernels on AMD Zen 4, unless the user has set ``OPENBLAS_CORETYPE``.

    By default OpenBLAS uses its kernels for Intel's AVX-512. Zen 4 executes 512-bit instructions in two halves, and the
    AVX2 kernels are 5 to 12 % faster: 105 instead of 94 GFLOP/s per core (float32, 100 x 784 by 784 x 1024, OpenBLAS
    0.3.31).
    """
    if all(mark in cpuinfo for mark in _ZEN_4) and "OPENBLAS_CORETYPE" not in environ:
        environ["OPENBLAS_CORETYPE"] = CHOSEN["OPENBLAS_CORETYPE"] = "Haswell"


if "numpy" not in sys.modules:
    with suppress(OSError):
        choose_kernels(os.environ, Path("/proc/cpuinfo").read_text())
