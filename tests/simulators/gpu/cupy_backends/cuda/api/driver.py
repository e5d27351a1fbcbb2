from __future__ import annotations


def occupancyMaxActiveBlocksPerMultiprocessor(func: int, blockSize: int, dynamicSMemSize: int) -> int:  # noqa: N802, N803
    assert blockSize == 256 and dynamicSMemSize == 0
    return 5
