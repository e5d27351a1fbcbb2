"""Ranges and sums."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mpitrain.core.kernels import sum_in_place
from mpitrain.core.layout import ALIGN
from mpitrain.core.ranges import aligned_range, buckets_of


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (0, 16), (16, 1000), (32, 100_000)])
def test_parts_cover_the_range_once(start: int, stop: int, parts: int) -> None:
    ranges = [aligned_range(start, stop, index, parts) for index in range(parts)]
    assert [x for lo, hi in ranges for x in range(lo, hi)] == list(range(start, stop))
    assert all(lo % ALIGN == 0 for lo, hi in ranges if lo < hi)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize(("lo", "hi"), [(0, 0), (3, 4), (1, 9999), (0, 10_000)])
def test_sum_in_place_adds_in_the_order_of_rows(n: int, lo: int, hi: int, dtype: type) -> None:
    rows = np.random.default_rng(n).standard_normal((n, 10_000)).astype(dtype)
    for row in range(n):
        expected = rows.copy()
        total = rows[0, lo:hi].copy()
        for r in range(1, n):
            total += rows[r, lo:hi]
        expected[row, lo:hi] = dtype(0.25) * total
        changed = rows.copy()
        sum_in_place(changed, np.arange(n), lo, hi, 0.25, row)
        assert changed.tobytes() == expected.tobytes()


@pytest.mark.parametrize("least", [0, 1, 10, 35, 1000])
def test_buckets_cut_at_layers_from_the_end(least: int) -> None:
    starts = [0, 0, 10, 30, 30, 60]
    buckets = buckets_of(starts, 70, least)
    assert buckets[0].hi == 70
    assert buckets[-1].lo == 0
    assert all(a.lo == b.hi for a, b in pairwise(buckets))
    assert all(b.lo in starts for b in buckets)
    assert all(b.hi - b.lo >= least for b in buckets[:-1])
