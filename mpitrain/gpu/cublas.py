"""Matrix products with cuBLAS, called directly: CuPy rejects cuBLAS during stream capture, though cuBLAS allows it.

Each handle is bound to one device and one stream, so that no thread creates a handle during a capture.
"""

from __future__ import annotations

import ctypes
from typing import Any

import cupy
import numpy as np
from cupy_backends.cuda.libs import cublas

from ..core.layout import Array
from ..errors import DeviceError

# A math mode missing in CuPy: products with 16-bit results are summed in float32 throughout.
_NO_REDUCED_SUMS = 16
# NVIDIA's recommendation for Hopper. Without it cuBLAS would allocate a workspace that becomes part of graphs.
_WORKSPACE_BYTES = 32 << 20
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class Blas:
    """Matrix products on the current device and one stream.

    Args:
        stream: Address of the stream.
    """

    def __init__(self, stream: int) -> None:
        library = ctypes.CDLL(cublas.__file__)  # this module is linked with cuBLAS
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
        # After setStream, which resets the workspace.
        _check(set_workspace(self._handle, self._workspace.data.ptr, _WORKSPACE_BYTES))

    @property
    def workspace(self) -> int:
        """Bytes of the workspace."""
        return int(self._workspace.nbytes)

    def gemm(self, a: Any, b: Any, out: Any, types: dict[Any, int], compute: int) -> Array:
        """Set ``out`` to ``a @ b`` and return it; ``out`` is row-major, ``a`` and ``b`` are row- or column-major.

        Args:
            types: cuBLAS's data type for each dtype.
            compute: cuBLAS's compute type.
        """
        # cuBLAS reads a row-major matrix as its transpose in column-major order, so compute out.T = b.T @ a.T.
        (m, k), n = a.shape, b.shape[1]
        one, zero = _FACTORS[compute == cublas.CUBLAS_COMPUTE_64F]
        left, left_stride = _as_columns(b)
        right, right_stride = _as_columns(a)
        # fmt: off
        _check(self._gemm(
            self._handle, left, right, n, m, k, one.ctypes.data,
            b.data.ptr, types[b.dtype], left_stride, a.data.ptr, types[a.dtype], right_stride,
            zero.ctypes.data, out.data.ptr, types[out.dtype], _row_stride(out), compute,
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
        raise DeviceError(f"cuBLAS failed to compute a matrix product: status {status} (see cublasStatus_t)")


def _as_columns(matrix: Array) -> tuple[int, int]:
    """Return cuBLAS's operation and leading dimension for reading a matrix as its transpose in column-major order."""
    if matrix.strides[1] == matrix.itemsize or matrix.shape[1] == 1:
        return cublas.CUBLAS_OP_N, _row_stride(matrix)
    return cublas.CUBLAS_OP_T, _row_stride(matrix.T)


def _row_stride(matrix: Array) -> int:
    """Return the number of elements from one row to the next."""
    rows, columns = matrix.shape
    return max(columns, matrix.strides[0] // matrix.itemsize) if rows > 1 else columns
