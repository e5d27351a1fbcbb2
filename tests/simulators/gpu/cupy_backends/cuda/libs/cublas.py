"""cuBLAS's product, by its definition: matrices are stored by columns, with ``ld`` elements from one column to the
next."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
from cupy.cuda.stream import Stream, by_number, get_current_stream, submit
from libraries import libraries

CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_32F_FAST_TF32 = 68, 70, 77
CUBLAS_GEMM_DEFAULT = -1

_TYPES = {
    0: (np.float32, ctypes.c_float),
    1: (np.float64, ctypes.c_double),
    2: (np.float16, ctypes.c_uint16),
    14: (ml_dtypes.bfloat16, ctypes.c_uint16),
}


_SUPPORTED = {
    (0, 0, 0, CUBLAS_COMPUTE_32F),
    (0, 0, 0, CUBLAS_COMPUTE_32F_FAST_TF32),
    (1, 1, 1, CUBLAS_COMPUTE_64F),
    *((narrow, narrow, out, CUBLAS_COMPUTE_32F) for narrow in (2, 14) for out in (narrow, 0)),
}


# CuPy's functions, none of which may be called in a capture.

_streams: dict[int, Stream] = {}
_workspaces: dict[int, int] = {}


def _refuse_in_capture() -> None:
    if get_current_stream().is_capturing():
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")


def create() -> int:
    _refuse_in_capture()
    _streams[len(_streams) + 1] = Stream.null
    return len(_streams)


def setStream(handle: int, stream: int) -> None:  # noqa: N802
    _refuse_in_capture()
    _streams[handle] = by_number(stream)
    _workspaces[handle] = 0


def setMathMode(handle: int, mode: int) -> None:  # noqa: N802
    _refuse_in_capture()
    assert handle in _streams and mode == 16


# Functions of the cuBLAS library that mpitrain calls without CuPy.


class _Library:
    """The functions of cuBLAS that are called with ctypes."""

    def __init__(self) -> None:
        self.cublasGemmEx, self.cublasSetWorkspace_v2 = cublasGemmEx, cublasSetWorkspace_v2


def cublasSetWorkspace_v2(handle: int, address: int, size: int) -> int:  # noqa: N802
    _workspaces[handle] = size
    return 0


def _columns(address: int, kind: int, rows: int, columns: int, ld: int) -> Any:
    """Return the matrix (rows, columns) at an address."""
    assert ld >= max(1, rows), f"ld {ld} of {rows} rows"
    kept, number = _TYPES[kind]
    size = (columns - 1) * ld + rows
    flat = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(number)), (size,))
    return np.lib.stride_tricks.as_strided(flat.view(kept), (rows, columns), (flat.itemsize, ld * flat.itemsize))


def cublasGemmEx(  # noqa: N802
    handle: int,
    transa: int,
    transb: int,
    m: int,
    n: int,
    k: int,
    alpha: int,
    a: int,
    a_type: int,
    lda: int,
    b: int,
    b_type: int,
    ldb: int,
    beta: int,
    c: int,
    c_type: int,
    ldc: int,
    compute: int,
    algorithm: int,
) -> int:
    assert _streams[handle] is get_current_stream() and _workspaces[handle] and algorithm == CUBLAS_GEMM_DEFAULT
    assert (a_type, b_type, c_type, compute) in _SUPPORTED
    number = ctypes.c_double if compute == CUBLAS_COMPUTE_64F else ctypes.c_float
    assert number.from_address(alpha).value == 1 and number.from_address(beta).value == 0
    left = _columns(a, a_type, m, k, lda) if transa == CUBLAS_OP_N else _columns(a, a_type, k, m, lda).T
    right = _columns(b, b_type, k, n, ldb) if transb == CUBLAS_OP_N else _columns(b, b_type, n, k, ldb).T
    out = _columns(c, c_type, m, n, ldc)
    kind = np.float64 if compute == CUBLAS_COMPUTE_64F else np.float32

    def multiply() -> None:
        low = compute == CUBLAS_COMPUTE_32F_FAST_TF32
        out[...] = np.matmul(*(_as_tf32(x) if low else x.astype(kind) for x in (left, right)))

    submit(multiply, stream=_streams[handle])
    return 0


def _as_tf32(x: Any) -> Any:
    """Return the values with their last 13 bits set to zero."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


libraries[__file__] = _Library()
