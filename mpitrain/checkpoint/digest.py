"""Digests that tell whether bytes are what was written."""

from __future__ import annotations

import numpy as np
import xxhash

from ..core.layout import Array

# 128 bits at the speed of memory: a save must not wait for its digests. It finds damage, not forgery.
ALGORITHM = "xxh3-128"
LENGTH = len(ALGORITHM) + 1 + 32


class Digest:
    """The digest of bytes that are given one after the other.

    The interpreter is free while more than a few kilobytes are added.
    """

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def add(self, data: bytes | Array) -> None:
        """Go on with ``data``: bytes, or a C-contiguous array of uint8."""
        self._state.update(data if isinstance(data, bytes) else data.data)

    def __str__(self) -> str:
        return f"{ALGORITHM}:{self._state.hexdigest()}"


def digest_of(data: bytes) -> str:
    """The digest of bytes, such as ``xxh3-128:<32 hexadecimal digits>``."""
    digest = Digest()
    digest.add(data)
    return str(digest)


def bytes_of(array: Array) -> Array:
    """The bytes of a C-contiguous array, shape (nbytes,) uint8, in the same memory."""
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8)
