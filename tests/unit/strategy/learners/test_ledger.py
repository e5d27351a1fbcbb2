"""Which examples each learner trains: all of them once, and again only those of learners that have died."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from mpitrain.strategy.learners.ledger import Ledger, Left, Ranges


@pytest.mark.parametrize("units", [(1,), (10, 10), (7, 10, 32)])
def test_every_example_is_given_out_once(units: tuple[int, ...]) -> None:
    ledger, chosen = Ledger({}, 1000), random.Random(0)
    for number in range(len(units)):
        ledger.join(str(number), "process", 0)
    counts: Counter[int] = Counter()
    while not ledger.is_given_out:
        number = chosen.randrange(len(units))
        claimed = ledger.claim(str(number), chosen.choice([1, 50, 200]), units[number])
        assert claimed is not None and (claimed[1] - claimed[0]) % units[number] == 0
        counts.update(range(*claimed))
        ledger = Ledger.parse(ledger.dump())
    assert ledger.claim("0", 50, units[0]) is None
    assert all(counts[example] == 1 for example in range(1000)) and max(counts) < 1000 + max(units)


@pytest.mark.parametrize("merged", [0, 10, 30, 35, 60])
def test_what_was_not_merged_is_given_out_again(merged: int) -> None:
    ledger = Ledger({}, 1000)
    ledger.join("a", "process", 0)
    ranges = [ledger.claim("a", 30, 10), ledger.claim("a", 30, 10)]
    assert ranges == [(0, 30), (30, 60)]
    ledger.settle("a", merged // 2)
    generation = ledger.join("a", "another process", merged)
    assert generation == 2 and ledger.members["a"].process == "another process"
    assert sum(hi - lo for lo, hi in ledger.free) == 60 - merged
    again = []
    while ledger.free:
        claimed = ledger.claim("a", 30, 10)
        assert claimed is not None
        again += range(*claimed)
    assert set(again) >= set(range(merged, 60)) and min([*again, merged]) > merged - 10


def test_a_learner_that_was_given_up_has_no_process() -> None:
    ledger = Ledger({}, 100)
    ledger.join("a", "process", 0)
    ledger.join("b", "process", 0)
    ledger.claim("a", 20, 10)
    ledger.give_up("a", 10)
    assert (ledger.living, ledger.free, ledger.members["a"].generation) == (1, [(10, 20)], 2)
    assert ledger.claim("b", 50, 10) == (10, 20)


def test_ranges_are_trained_one_after_the_other() -> None:
    ranges = Ranges()
    assert not ranges.take_next(0) and not ranges.has_ended(0)
    ranges.update([(100, 120), (40, 60)], is_reset=False, left=Left.SOME)
    assert ranges.take_next(0) and ranges.current == (100, 120) and ranges.trained(110) == 10
    assert not ranges.take_next(110)
    assert ranges.take_next(120) and ranges.current == (40, 60) and ranges.trained(50) == 30
    assert not ranges.take_next(60) and ranges.trained(75) == 40 and not ranges.has_ended(75)
    ranges.update([], is_reset=False, left=Left.UNKNOWN)
    assert ranges.must_wait(75) and not ranges.has_ended(75)
    ranges.update([], is_reset=False, left=Left.NONE)
    assert ranges.has_ended(75) and not ranges.must_wait(75)
    ranges.update([(0, 10)], is_reset=True, left=Left.SOME)
    assert ranges.take_next(75) and ranges.trained(5) == 5


@pytest.mark.parametrize("data", [b"", b'{"facts": {}', b"[]", b"{}", b'{"members": {"a": {"held": 1}}}'])
def test_a_damaged_ledger_is_an_error_of_the_folder(data: bytes) -> None:
    with pytest.raises(OSError, match="damaged"):
        Ledger.parse(data)
