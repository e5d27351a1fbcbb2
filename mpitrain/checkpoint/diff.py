"""The differences between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..core.layout import Array
from .reader import Checkpoint


def differences(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    """Yield a line for each attribute and dataset that differs in any bit; the time of saving is ignored.

    Raises:
        DamagedCheckpoint: A checkpoint's values are damaged.
    """
    for group in sorted({*a.attributes, *b.attributes}):
        mine, other = a.attributes.get(group, {}), b.attributes.get(group, {})
        for name in sorted({*mine, *other} - {"saved_at"}):
            if mine.get(name) != other.get(name):
                yield f"{group.rstrip('/')}/{name}: {mine.get(name, 'missing')} | {other.get(name, 'missing')}"
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
        line = f"{differing:,} of {x.size:,} values differ"
    else:
        differing = 1
        line = f"dtype {mine.dtype} | {other_one.dtype}"
    if not differing:
        return ""
    return f"{line}, by at most {_largest(x, y):.3g}" if x.dtype.kind == y.dtype.kind == "f" and x.size else line


def _bits(array: Array) -> Array:
    """Return the bytes of each value, shape (size, itemsize)."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, -1)


def _largest(x: Array, y: Array) -> float:
    """Return the largest absolute difference; NaN if any difference is NaN."""
    with np.errstate(all="ignore"):
        return float(np.abs(x.astype(np.float64) - y.astype(np.float64)).max())
