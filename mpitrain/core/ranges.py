"""Ranges of a flat vector or of a batch: nearly equal parts, and buckets of consecutive layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from .layout import ALIGN

# Called with ``start`` when ``grads[start:]`` is final; with decreasing values, finally 0.
OnReady = Callable[[int], None]

Range = tuple[int, int]  # first element, and the element after the last


def announce_nothing(start: int) -> None:
    """Do nothing: an ``OnReady`` for gradients that are not final, such as those of a micro-batch."""


def aligned_range(start: int, stop: int, index: int, parts: int) -> tuple[int, int]:
    """Return the ``index``-th of ``parts`` nearly equal ranges of [start, stop), split at cache lines."""
    lines = -(-(stop - start) // ALIGN)
    lo = start + lines * index // parts * ALIGN
    hi = start + lines * (index + 1) // parts * ALIGN
    return min(lo, stop), min(hi, stop)


class Bucket(NamedTuple):
    """A range of the vector that is averaged in one operation: the gradients of consecutive layers."""

    lo: int
    hi: int


def buckets_of(starts: Sequence[int], size: int, bucket_elements: int) -> list[Bucket]:
    """Split [0, size) at ``starts`` into buckets, last first: of ``bucket_elements`` or more, except the one at 0."""
    buckets: list[Bucket] = []
    hi = size
    for lo in sorted({0, *starts}, reverse=True):
        if hi - lo >= bucket_elements or lo == 0:
            buckets.append(Bucket(lo, hi))
            hi = lo
    return buckets


def split_batch(batch: int, parts: int) -> list[tuple[int, int]]:
    """Return nearly equal ranges of [0, batch), none empty."""
    cuts = [batch * i // parts for i in range(parts + 1)]
    return [(a, b) for a, b in pairwise(cuts) if a < b]
