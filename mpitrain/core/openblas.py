"""Which of its kernels OpenBLAS is to use, where its own choice is not the fastest. Runs before NumPy is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

_ZEN_4 = ("vendor_id\t: AuthenticAMD", "cpu family\t: 25", " avx512f ")


CHOSEN: dict[str, str] = {}  # what was set here, which is for this host's processor


def choose_kernels(environ: MutableMapping[str, str], cpuinfo: str) -> None:
    """On AMD's Zen 4 have OpenBLAS take its AVX2 kernels, unless the user has chosen.

    OpenBLAS takes those for Intel's AVX-512 there. Zen 4 does 512 bits in two halves, and the AVX2 kernels are
    5 to 12 % faster: 105 in place of 94 GFLOP/s a core (float32, 100 x 784 by 784 x 1024, OpenBLAS 0.3.31).
    """
    if all(mark in cpuinfo for mark in _ZEN_4) and "OPENBLAS_CORETYPE" not in environ:
        environ["OPENBLAS_CORETYPE"] = CHOSEN["OPENBLAS_CORETYPE"] = "Haswell"


if "numpy" not in sys.modules:
    with suppress(OSError):
        choose_kernels(os.environ, Path("/proc/cpuinfo").read_text())
