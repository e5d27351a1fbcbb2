"""Override the kernels that OpenBLAS and MKL choose, if they are not the fastest, or not reproducible. Runs before
NumPy is imported.

A run that resumes uses the kernels of its last start, if the CPU can execute them, because each kernel sums in a
different order: ``mpitrain run`` reads them from the run's record and passes them to the ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

CORE_TYPE = "OPENBLAS_CORETYPE"
MKL_RESULTS = "MKL_CBWR"  # read at MKL's first product
KERNELS = "MPITRAIN_BLAS_KERNELS"  # set by ``mpitrain run``: the kernels that all ranks are to use

_ZEN_4 = ("vendor_id\t: AuthenticAMD", "cpu family\t: 25", " avx512f ")
_AVX2 = {"avx2", "fma"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
# OpenBLAS does not check whether the CPU can execute kernels that a variable names.
_REQUIRED_FLAGS = {
    "sandybridge": {"avx"},
    "haswell": _AVX2,
    "zen": _AVX2,
    "skylakex": _AVX512,
    "cooperlake": _AVX512 | {"avx512_bf16"},
    "sapphirerapids": _AVX512 | {"avx512_bf16", "amx_bf16"},
}

CHOSEN: dict[str, str] = {}  #: Environment variables that this module has set, valid for this host's CPU.


def choose_results_of_mkl(environ: MutableMapping[str, str], cpuinfo: str) -> None:
    """Unless the user has set ``MKL_CBWR``, let torch's matrix products not depend on the alignment of its tensors.

    By default, MKL's products of the same small matrices at other addresses may differ in the last bit, so a run would
    depend on where its batches are in memory. On AMD, ``AUTO`` is enough, and as fast as the default; MKL supports
    ``STRICT`` on Intel's CPUs. Source: Intel oneMKL Developer Guide, "Reproducibility Conditions".
    """
    if MKL_RESULTS not in environ:
        environ[MKL_RESULTS] = CHOSEN[MKL_RESULTS] = "AUTO,STRICT" if "GenuineIntel" in cpuinfo else "AUTO"


def without_chosen(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for other processes, without the variables that this module has set."""
    return {name: value for name, value in environ.items() if CHOSEN.get(name) != value}


def choose_kernels(environ: MutableMapping[str, str], cpuinfo: str) -> None:
    """Unless the user has set ``OPENBLAS_CORETYPE``, set it to the run's kernels or, on AMD Zen 4, to the AVX2 kernels.

    On Zen 4, OpenBLAS by default uses its kernels for Intel's AVX-512. Zen 4 executes 512-bit instructions in two
    halves, and the AVX2 kernels are 5 to 12 % faster. A core reaches 105 instead of 94 GFLOP/s (float32,
    100 x 784 by 784 x 1024, OpenBLAS 0.3.31).
    """
    if CORE_TYPE in environ:
        return
    kernels = environ.get(KERNELS, "")
    if not _can_execute(cpuinfo, kernels):
        kernels = "Haswell" if all(mark in cpuinfo for mark in _ZEN_4) else ""
    if kernels:
        environ[CORE_TYPE] = CHOSEN[CORE_TYPE] = kernels


def _can_execute(cpuinfo: str, kernels: str) -> bool:
    """Return whether these kernels are known, and the CPU has the instructions that they use."""
    required = _REQUIRED_FLAGS.get(kernels.lower())
    line = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    return required is not None and required <= set(line.split())


with suppress(OSError):
    _cpuinfo = Path("/proc/cpuinfo").read_text()
    choose_results_of_mkl(os.environ, _cpuinfo)
    if "numpy" not in sys.modules:
        choose_kernels(os.environ, _cpuinfo)
