"""The checksum CRC-32C, eight bytes at a time (Kounavis and Berry, 2008: "slicing by 8")."""

from __future__ import annotations

import numpy as np

from ..core.kernels import kernel
from ..core.layout import Array

_POLYNOMIAL = 0x82F63B78  # Castagnoli's polynomial, lowest power first


def _tables() -> Array:
    """Return the checksum of each of the 256 byte values followed by 0 to 7 zero bytes; shape (8, 256)."""
    tables = np.empty((8, 256), np.uint64)
    tables[0] = np.arange(256)
    for _ in range(8):
        tables[0] = tables[0] >> np.uint64(1) ^ (tables[0] & np.uint64(1)) * np.uint64(_POLYNOMIAL)
    for row in range(1, 8):
        tables[row] = tables[row - 1] >> np.uint64(8) ^ tables[0][tables[row - 1] & np.uint64(255)]
    return tables


_TABLES = _tables()


@kernel
def crc32c(content: Array, start: int, stop: int) -> int:
    """Return the checksum of the bytes [start, stop)."""
    crc = np.uint64(0xFFFFFFFF)
    at = start
    while at + 8 <= stop:
        word = np.uint64(0)
        for i in range(8):
            word |= np.uint64(content[at + i]) << np.uint64(8 * i)
        word ^= crc
        crc = np.uint64(0)
        for i in range(8):
            crc ^= _TABLES[7 - i, word >> np.uint64(8 * i) & np.uint64(255)]
        at += 8
    while at < stop:
        crc = crc >> np.uint64(8) ^ _TABLES[0, (crc ^ np.uint64(content[at])) & np.uint64(255)]
        at += 1
    return crc ^ np.uint64(0xFFFFFFFF)
