"""Headers of requests and replies: a sequence number, a kind, a message, and a checksum in the last word."""

from __future__ import annotations

import numpy as np

from ...core.kernels import kernel
from ...core.layout import Array

HEADER = 16  # words
MESSAGE = slice(2, HEADER - 1)


def make_header(number: int, kind: int, message: Array) -> Array:
    """Return the header of a request or a reply, int64, shape (HEADER,).

    Args:
        message: Shape (), a structured dtype of at most 104 bytes.
    """
    words = np.zeros(HEADER, np.int64)
    words[0], words[1] = number, kind
    if message.nbytes:
        words[MESSAGE].view(np.uint8)[: message.nbytes] = message.reshape(1).view(np.uint8)
    words[-1] = _checksum(words)
    return words


@kernel
def has_arrived(headers: Array, index: int, number: int) -> bool:
    """Return whether a header with this sequence number is complete in ``headers[index]``."""
    return headers[index, 0] == number and headers[index, -1] == _checksum(headers[index])  # type: ignore[no-any-return]


@kernel
def _checksum(words: Array) -> int:
    total = np.uint64(0x9E3779B97F4A7C15)
    for i in range(words.size - 1):
        total = (total ^ np.uint64(words[i])) * np.uint64(0xBF58476D1CE4E5B9)
        total ^= total >> np.uint64(31)
    return np.int64(total >> np.uint64(1))  # type: ignore[no-any-return]
