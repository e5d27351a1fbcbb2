"""Digests to detect damaged data."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import xxhash

from ..core.layout import Array

# XXH3 computes 128 bits at memory speed, so that digests do not slow down saving. It detects damage, not forgery.
ALGORITHM = "xxh3-128"
LENGTH = len(ALGORITHM) + 1 + 32
_DIGEST = re.compile(f"{ALGORITHM}:[0-9a-f]{{32}}")


class Digest:
    """A digest of data that is added in several calls.

    Releases the GIL for data of more than a few kilobytes.
    """

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def add(self, data: bytes | memoryview | Array) -> None:
        """Add ``data``: bytes, or a C-contiguous array of uint8."""
        self._state.update(data if isinstance(data, (bytes, memoryview)) else data.data)

    def __str__(self) -> str:
        return f"{ALGORITHM}:{self._state.hexdigest()}"


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of bytes, as ``xxh3-128:<32 hexadecimal digits>``."""
    digest = Digest()
    digest.add(data)
    return str(digest)


def is_digest(value: Any) -> bool:
    """Return whether a value read from a file is the text of a digest."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def bytes_of(array: Array) -> Array:
    """Return the bytes of a C-contiguous array as a view, shape (nbytes,) uint8."""
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8)
