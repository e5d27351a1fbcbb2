"""Fragments of the parameters, and the steps at which they are exchanged."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mpitrain.plan.parallel import ParallelConfig
from mpitrain.strategy.fragments import fragments_of

SCHEDULES = pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (1, 7), (3, 1), (8, 0)])


@SCHEDULES
@pytest.mark.parametrize("size", [1, 1000, 4099])
def test_every_element_is_exchanged_once_in_a_cycle(size: int, fragments: int, overlap: int) -> None:
    parts = list(fragments_of(size, ParallelConfig(fragments=fragments, overlap_steps=overlap, local_steps=8)))
    assert (parts[0].lo, parts[-1].hi, len(parts), parts[-1].merges) == (0, size, fragments, 8)
    for part, following in pairwise(parts):
        assert part.hi == following.lo and part.merges <= following.begins
    assert all(1 <= part.begins <= part.merges for part in parts)


@SCHEDULES
@pytest.mark.parametrize("local_after", [0, 5, 8])
def test_the_first_outer_update_is_the_first_merge_of_an_exchange_that_has_begun(
    local_after: int, fragments: int, overlap: int
) -> None:
    parallel = ParallelConfig(local_after=local_after, fragments=fragments, overlap_steps=overlap, local_steps=8)
    exchanges = list(fragments_of(1000, parallel))
    begun = [
        step + overlap
        for step in range(local_after + 1, 100)
        for exchange in exchanges
        if (step - 1) % 8 + 1 == exchange.begins
    ]
    assert parallel.first_outer_update == begun[0]
