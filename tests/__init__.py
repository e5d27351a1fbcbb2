"""Tests. This package imports mpitrain before NumPy, so that all processes of a test use the same BLAS kernels."""

import mpitrain  # noqa: F401
