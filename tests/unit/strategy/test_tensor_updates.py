"""Whole tensors are divided among the ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mpitrain.core.layout import Layout
from mpitrain.strategy.tensor_updates import tensor_ranges

SHAPES = {"a": (1000, 3), "b": (7,), "c": (400, 5), "d": (1,), "e": (64, 64)}
LAYOUT = Layout.pack([(name, shape, "param") for name, shape in SHAPES.items()] + [("mean", (9,), "state")])


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_each_tensor_is_in_one_range(parts: int) -> None:
    ranges = tensor_ranges(LAYOUT, parts)
    assert len(ranges) == parts and ranges[0][0] == 0 and ranges[-1][1] == LAYOUT.n_trained
    assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
    starts = {entry.start for entry in LAYOUT.entries} | {LAYOUT.n_trained}
    assert starts.issuperset(stop for _, stop in ranges)
    largest = max(entry.stop - entry.start for entry in LAYOUT.entries)
    assert max(stop - start for start, stop in ranges) <= LAYOUT.n_trained / parts + largest
