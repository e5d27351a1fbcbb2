"""Where two checkpoints differ."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..core.layout import Array
from .reader import Checkpoint


def differences(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    """A line for each attribute and dataset that is not the same, bit for bit; the time of saving does not count.

    Raises:
        DamagedCheckpoint: Values are not as they were written.
    """
    for group in sorted({*a.attributes, *b.attributes}):
        mine, other = a.attributes.get(group, {}), b.attributes.get(group, {})
        for name in sorted({*mine, *other} - {"saved_at"}):
            if mine.get(name) != other.get(name):
                yield f"{group.rstrip('/')}/{name}: {mine.get(name, 'not there')} | {other.get(name, 'not there')}"
    for name in [*a.datasets, *(name for name in b.datasets if name not in a.datasets)]:
        line = _compare(a, b, name)
        if line:
            yield f"{name}: {line}"


def _compare(a: Checkpoint, b: Checkpoint, name: str) -> str:
    for one, other in ((a, b), (b, a)):
        if name not in one.datasets:
            return f"only in {other.path}"
    mine, other_one = a.datasets[name], b.datasets[name]
    if mine.shape != other_one.shape:
        return f"shape {mine.shape} | {other_one.shape}"
    x, y = a.read(name), b.read(name)
    if mine.dtype == other_one.dtype:
        differing = int((_bits(x) != _bits(y)).any(axis=-1).sum())
        told = f"{differing:,} of {x.size:,} values differ"
    else:
        differing = 1
        told = f"type {mine.dtype} | {other_one.dtype}"
    if not differing:
        return ""
    return f"{told}, by {_largest(x, y):.3g} at most" if x.dtype.kind == y.dtype.kind == "f" and x.size else told


def _bits(array: Array) -> Array:
    """The bytes of each value, shape (size, itemsize)."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, -1)


def _largest(x: Array, y: Array) -> float:
    """The largest difference of values; NaN where one is."""
    with np.errstate(all="ignore"):
        return float(np.abs(x.astype(np.float64) - y.astype(np.float64)).max())
