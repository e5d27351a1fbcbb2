"""The files that learners exchange: a header and an array of numbers, with a digest of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...checkpoint.digest import LENGTH, Digest, bytes_of, digest_of
from ...core.layout import Array

_ALIGNMENT = 512  # of the array in a record; more than a header of a contribution, for ``Store.replace``


class Record(NamedTuple):
    """A header of numbers and strings by name, and an array."""

    header: dict[str, Any]
    values: Array


def pack(header: dict[str, Any], arrays: Sequence[Array]) -> bytes:
    """Return a record of a header and arrays, one after the other, as bytes."""
    text = json.dumps(header).encode()
    before = LENGTH + 2 + len(text)  # two ends of lines
    space = b" " * (-before % _ALIGNMENT)
    parts: list[bytes | memoryview] = [text, space, b"\n", *(bytes_of(array).data for array in arrays)]
    digest = Digest()
    for part in parts:
        digest.add(part)
    return b"".join([str(digest).encode(), b"\n", *parts])  # the only copy


def unpack(data: bytes | None, dtype: np.dtype[Any], size: int) -> Record | None:
    """Return a record whose array has shape (size,); None if it is missing, truncated, damaged or of another size."""
    if data is None or len(data) <= LENGTH or digest_of(memoryview(data)[LENGTH + 1 :]).encode() != data[:LENGTH]:
        return None
    end = data.find(b"\n", LENGTH + 1)
    if end < 0 or len(data) - end - 1 != size * dtype.itemsize:
        return None
    header = json.loads(data[LENGTH + 1 : end])
    return Record(header, np.frombuffer(data, dtype, offset=end + 1)) if isinstance(header, dict) else None
