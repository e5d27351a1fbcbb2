from __future__ import annotations


def get_cublas_handle() -> int:
    return 1
