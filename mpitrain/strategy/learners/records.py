"""The files that learners exchange: a header and an array of numbers, with a digest of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...checkpoint.digest import LENGTH, bytes_of, digest_of
from ...core.layout import Array


class Record(NamedTuple):
    """A header of numbers and strings by name, and an array."""

    header: dict[str, Any]
    values: Array


def pack(header: dict[str, Any], arrays: Sequence[Array]) -> bytes:
    """Return a record of a header and arrays, one after the other, as bytes."""
    body = b"".join([json.dumps(header).encode(), b"\n", *(bytes_of(array).tobytes() for array in arrays)])
    return digest_of(body).encode() + b"\n" + body


def unpack(data: bytes | None, dtype: np.dtype[Any], size: int) -> Record | None:
    """Return a record whose array has shape (size,); None if it is missing, truncated, damaged or of another size."""
    if data is None or len(data) <= LENGTH or digest_of(data[LENGTH + 1 :]).encode() != data[:LENGTH]:
        return None
    text, _, body = data[LENGTH + 1 :].partition(b"\n")
    if len(body) != size * dtype.itemsize:
        return None
    header = json.loads(text)
    return Record(header, np.frombuffer(body, dtype)) if isinstance(header, dict) else None
