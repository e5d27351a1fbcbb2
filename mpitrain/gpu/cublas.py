"""cuBLAS's product, called past CuPy, which refuses cuBLAS in a capture that cuBLAS itself allows.

A handle belongs to one device and one stream here, so that no thread makes one in the middle of a capture.
"""

from __future__ import annotations

import ctypes
from typing import Any

import cupy
import numpy as np
from cupy_backends.cuda.libs import cublas

from ..core.layout import Array
from ..errors import DeviceError

# Not in CuPy: products that write 16 bits are summed in float32 to the end.
_NO_REDUCED_SUMS = 16
# What NVIDIA recommends for Hopper; a workspace of cuBLAS's own would become part of graphs.
_WORKSPACE_BYTES = 32 << 20
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class Blas:
    """Products on the current device and one stream.

    Args:
        stream: Its address.
    """

    def __init__(self, stream: int) -> None:
        library = ctypes.CDLL(cublas.__file__)  # which is linked with cuBLAS
        self._gemm = library.cublasGemmEx
        self._gemm.restype = _INT
        operand: list[Any] = [_POINTER, _INT, _INT]
        self._gemm.argtypes = [_POINTER, *[_INT] * 5, _POINTER, *operand, *operand, _POINTER, *operand, _INT, _INT]
        set_workspace = library.cublasSetWorkspace_v2
        set_workspace.restype, set_workspace.argtypes = _INT, [_POINTER, _POINTER, ctypes.c_size_t]
        self._handle = cublas.create()
        cublas.setStream(self._handle, stream)
        cublas.setMathMode(self._handle, _NO_REDUCED_SUMS)
        self._workspace = cupy.empty(_WORKSPACE_BYTES, np.uint8)
        _check(
            set_workspace(self._handle, self._workspace.data.ptr, _WORKSPACE_BYTES)
        )  # after the stream, which resets it

    @property
    def workspace(self) -> int:
        """Bytes that cuBLAS has been given."""
        return int(self._workspace.nbytes)

    def gemm(self, a: Any, b: Any, out: Any, types: dict[str, int], compute: int) -> Array:
        """``out``, which becomes ``a @ b``; each by rows, or ``a`` and ``b`` by columns.

        Args:
            types: cuBLAS's number for each character of a dtype.
            compute: In which type, as cuBLAS numbers it.
        """
        # Row by row, out is what cuBLAS calls out transposed; so it is given b.T @ a.T.
        (m, k), n = a.shape, b.shape[1]
        one, zero = _FACTORS[compute == cublas.CUBLAS_COMPUTE_64F]
        left, left_stride = _as_columns(b)
        right, right_stride = _as_columns(a)
        # fmt: off
        _check(self._gemm(
            self._handle, left, right, n, m, k, one.ctypes.data,
            b.data.ptr, types[b.dtype.char], left_stride, a.data.ptr, types[a.dtype.char], right_stride,
            zero.ctypes.data, out.data.ptr, types[out.dtype.char], _row_stride(out), compute,
            cublas.CUBLAS_GEMM_DEFAULT,
        ))
        # fmt: on
        product: Array = out
        return product


_FACTORS = {
    is_double: (np.ones(1, dtype), np.zeros(1, dtype)) for is_double, dtype in ((False, np.float32), (True, np.float64))
}


def _check(status: int) -> None:
    if status != 0:
        raise DeviceError(f"cuBLAS cannot take a product: status {status} (see cublasStatus_t)")


def _as_columns(matrix: Array) -> tuple[int, int]:
    """How cuBLAS, which stores columns, is to read a matrix for its transpose, and how far its rows lie apart."""
    if matrix.strides[1] == matrix.itemsize or matrix.shape[1] == 1:
        return cublas.CUBLAS_OP_N, _row_stride(matrix)
    return cublas.CUBLAS_OP_T, _row_stride(matrix.T)


def _row_stride(matrix: Array) -> int:
    """Elements from one row to the next."""
    rows, columns = matrix.shape
    return max(columns, matrix.strides[0] // matrix.itemsize) if rows > 1 else columns
