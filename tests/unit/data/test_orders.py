"""Orders of examples."""

from __future__ import annotations

from functools import partial

import numpy as np

from mpitrain import data
from mpitrain.data.batch import Loading
from mpitrain.data.checks import check_examples

from ...support.examples import refused


class TestOrders:
    def test_weighted(self) -> None:
        order = data.orders.Weighted([0, 1, 3, 0])
        drawn = order.indices(0, 8000, 4, 1)
        counts = np.bincount(drawn, minlength=4)
        assert counts[0] == counts[3] == 0 and 0.7 < counts[2] / 8000 < 0.8
        np.testing.assert_array_equal(drawn[100:300], order.indices(100, 200, 4, 1))

    def test_grouped_by_length(self) -> None:
        lengths = np.random.default_rng(0).integers(1, 100, 103)
        order = data.orders.GroupedByLength(lengths, 20)
        whole = order.indices(0, 206, 103, 5)
        assert sorted(whole[:103]) == sorted(whole[103:]) == list(range(103))
        assert (whole[:103] != whole[103:]).any()
        assert all((np.diff(lengths[whole[start : start + 20]]) <= 0).all() for start in (0, 20, 103, 183))
        for start, count in ((17, 9), (95, 30), (200, 6)):
            np.testing.assert_array_equal(order.indices(start, count, 103, 5), whole[start : start + count])

    def test_streams(self) -> None:
        split = data.from_arrays(np.arange(14.0), np.arange(14)).ordered(data.orders.Streams(4))
        assert len(split) == 12
        steps = split.order(0, 12, 0).reshape(3, 4)
        assert steps.tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]

    def test_own_function(self) -> None:
        split = data.from_arrays(np.arange(5.0), np.arange(5))
        own = split.ordered(lambda seed, position: (seed + 2 * position) % 5)
        assert own.order(3, 4, 1).tolist() == [2, 4, 1, 3]
        assert own.order_name != split.order_name
        refused("returned 9", split.ordered(lambda seed, position: 9).order, 0, 1, 0)
        refused("returned True", split.ordered(lambda seed, position: True).order, 0, 1, 0)
        refused("ZeroDivisionError", split.ordered(lambda seed, position: 1 // 0).order, 0, 1, 0)
        refused("returned 0.5", split.ordered(lambda seed, position: 0.5).order, 0, 1, 0)  # type: ignore[arg-type]

    def test_orders_of_files_that_are_read_in_blocks(self) -> None:
        split = data.from_arrays(np.arange(5.0), np.arange(5))
        split.ordered(data.orders.Sequential()).check_streamed()
        refused("Weighted", split.ordered(data.orders.Weighted([1] * 5)).check_streamed)

    def test_a_wrong_label_is_named_by_its_index(self) -> None:
        labels = np.arange(9) % 3
        labels[5] = 7
        split = data.from_arrays(np.zeros((9, 2)), labels, 3).map(lambda example: example)
        split = split.as_arrays()
        loader = split.own_loader(4, Loading(check=partial(check_examples, "training", split, None, 3)))
        refused("of example 5 ", lambda: [loader.batch(position, 3) for position in (9, 12, 15)])

    def test_streams_need_their_number_of_examples(self) -> None:
        split = data.from_arrays(np.arange(14.0), np.arange(14)).ordered(data.orders.Streams(4))
        split.check_step(4)
        refused("Streams(6)", split.check_step, 6)

    def test_mistakes(self) -> None:
        split = data.from_arrays(np.arange(5.0), np.arange(5))
        refused("4 weights", split.ordered, data.orders.Weighted([1] * 4))
        refused("not negative", data.orders.Weighted, [1, -1])
        refused("2 lengths", split.ordered, data.orders.GroupedByLength([1, 2], 2))
        refused("Streams(6)", split.ordered, data.orders.Streams(6))
