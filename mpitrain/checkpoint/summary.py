"""The contents of a checkpoint as a table, and the differences of two."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import numpy as np

from ..core.layout import Array
from ..monitor.format import format_table, printable
from .reader import Checkpoint

_FIRST = ("step", "position", "seed", "mode", "workers")
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def describe(checkpoint: Checkpoint, now: datetime | None = None) -> Iterator[str]:
    """Yield lines: facts about the run, then a table of name, shape, dtype and Euclidean norm of floating-point arrays.

    Raises:
        DamagedCheckpoint: The checkpoint's values are damaged.
    """
    yield f"{checkpoint.path}: {_facts(checkpoint, now or datetime.now(timezone.utc))}"
    states = sorted(name for name in checkpoint.attributes if name.startswith("run/state"))
    for name in (*states, "run/job", "run/config", "run/versions"):
        values = ", ".join(
            f"{key} {printable(str(value))}" for key, value in checkpoint.attributes.get(name, {}).items()
        )
        if values:
            yield f"{name.removeprefix('run/')}: {values}"
    yield ""
    stored = [name for name, dataset in checkpoint.datasets.items() if dataset.dtype.kind == "f"]
    yield format_table(("name", "shape", "dtype", "norm"), [_row(checkpoint, name) for name in stored])


def age(seconds: float) -> str:
    """Format a time in its largest unit, such as ``3 min``."""
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size):,} {unit}"
    return "0 s"


def norm(array: Array) -> float:
    """Return the Euclidean norm, summed in float64; it is not finite if any value is not finite."""
    total = 0.0
    for block in np.array_split(array.reshape(-1), max(1, array.size >> 20)):
        with np.errstate(over="ignore"):
            total += float(np.square(block, dtype=np.float64).sum())
    return float(np.sqrt(total))


def _facts(checkpoint: Checkpoint, now: datetime) -> str:
    root = dict(checkpoint.attributes["/"])
    saved = str(root.pop("saved_at"))
    root.pop("format")
    since = (now - datetime.fromisoformat(saved)).total_seconds()
    ordered = [*(name for name in _FIRST if name in root), *(name for name in root if name not in _FIRST)]
    facts = [f"{name} {_number(root[name])}" for name in ordered]
    return ", ".join([*facts, f"saved {age(since)} ago ({saved})"])


def _row(checkpoint: Checkpoint, name: str) -> tuple[str, str, str, str]:
    stored = checkpoint.datasets[name]
    shape = " x ".join(f"{n:,}" for n in stored.shape) or "-"
    return name, shape, str(stored.dtype), f"{norm(checkpoint.read(name)):.6g}"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else printable(str(value))


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
                texts = (printable(str(values.get(name, "missing"))) for values in (first, second))
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
