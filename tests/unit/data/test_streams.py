"""Streams of examples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mpitrain import data
from mpitrain.data.batch import Loading

from ...support.examples import refused


class TestStreams:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_ranks_and_processes_take_shares(self, workers: int) -> None:
        loaders = [data.stream(range(24), 24).own_loader(0, Loading(workers, 1, rank, 2)) for rank in range(2)]
        try:
            read = [loader.batch(position, 3).examples for position in range(0, 12, 3) for loader in loaders]
        finally:
            for loader in loaders:
                loader.close()
        read = sorted(int(example) for batch in read for example in batch)
        if workers == 0:
            assert read == list(range(24))
        else:  # a process that has made more batches than the other begins its share again
            assert len(read) == 24 and set(read) <= set(range(24))

    def test_a_share_opened_by_a_function(self) -> None:
        split = data.stream(lambda share, shares: range(share, 6, shares), 6)
        loader = split.own_loader(0, Loading(0, 1, 1, 3))
        assert [loader.batch(start, 1).examples.tolist() for start in range(3)] == [[1], [4], [1]]

    def test_a_resume_skips_what_was_used(self) -> None:
        split = data.stream(range(20), 6)
        alone = split.own_loader(0, Loading(share=1, shares=2))
        read = [alone.batch(position, 3).examples.tolist() for position in range(3, 45, 6)]
        assert read[:4] == [[1, 3, 5], [7, 9, 11], [13, 15, 17], [19, 1, 3]]
        for step in range(7):
            resumed = split.own_loader(0, Loading(share=1, shares=2))
            assert resumed.batch(3 + 6 * step, 3).examples.tolist() == read[step]

    def test_a_source_that_can_skip_is_not_read(self) -> None:
        class Skipping:
            def __init__(self, numbers: range, log: list[int]) -> None:
                self.numbers, self.log = numbers, log

            def __iter__(self) -> Iterator[int]:
                for number in self.numbers:
                    self.log.append(number)
                    yield number

            def skip(self, count: int) -> Skipping:
                return Skipping(self.numbers[count:], self.log)

        for position in (24, 51):  # the second one is in the second pass
            expected = data.stream(range(40), 40).own_loader(0, Loading(share=1, shares=2)).batch(position, 3)
            read: list[int] = []
            resumed = data.stream(Skipping(range(40), read), 40).own_loader(0, Loading(share=1, shares=2))
            assert resumed.batch(position, 3).examples.tolist() == expected.examples.tolist()
            assert min(read) == (24 if position == 24 else 0)

    def test_mistakes(self) -> None:
        refused("length=0", data.stream, range(3), 0)
        refused("no examples", data.stream([], 3).load, np.arange(1), 0, 0)
        refused("once", data.stream, iter([1]), 3)
        refused("order", data.stream(range(3), 3).ordered, data.orders.Weighted([1] * 3))
