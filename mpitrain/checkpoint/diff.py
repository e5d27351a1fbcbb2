"""The differences between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..core.layout import Array
from .reader import Checkpoint
from .summary import printable


def differences(a: Checkpoint, b: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield name and description of each attribute and dataset that differs in any bit.

    The attributes ``saved_at`` and ``run_dir`` are not compared.

    Raises:
        DamagedCheckpoint: A checkpoint's values are damaged.
    """
    for group in sorted({*a.attributes, *b.attributes}):
        first, second = a.attributes.get(group, {}), b.attributes.get(group, {})
        for name in sorted({*first, *second} - {"saved_at", "run_dir"}):
            if first.get(name) != second.get(name):
                texts = (printable(values.get(name, "missing")) for values in (first, second))
                yield f"{group.rstrip('/')}/{name}", " | ".join(texts)
    for name in [*a.datasets, *(name for name in b.datasets if name not in a.datasets)]:
        line = _compare(a, b, name)
        if line:
            yield name, line


def _compare(a: Checkpoint, b: Checkpoint, name: str) -> str:
    for one, other in ((a, b), (b, a)):
        if name not in one.datasets:
            return f"only in {other.path}"
    first, second = a.datasets[name], b.datasets[name]
    if first.shape != second.shape:
        return f"shape {first.shape} | {second.shape}"
    x, y = a.read(name), b.read(name)
    if first.dtype == second.dtype:
        differing = int((_bits(x) != _bits(y)).any(axis=-1).sum())
        line = f"{differing:,} of {x.size:,} values differ"
    else:
        differing = 1
        line = f"dtype {first.dtype} | {second.dtype}"
    if not differing:
        return ""
    return f"{line}, by at most {_largest(x, y):.3g}" if x.dtype.kind == y.dtype.kind == "f" and x.size else line


def _bits(array: Array) -> Array:
    """Return the bytes of each value, shape (size, itemsize)."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, array.itemsize)


def _largest(x: Array, y: Array) -> float:
    """Return the largest absolute difference; NaN if any difference is NaN."""
    with np.errstate(all="ignore"):
        return float(np.abs(x.astype(np.float64) - y.astype(np.float64)).max())
