"""Functions that transform examples."""

from __future__ import annotations

import numpy as np

from mpitrain import data

from ...support.examples import refused


class TestTransforms:
    def test_functions_are_applied_in_order(self) -> None:
        split = data.from_arrays(np.arange(6.0).reshape(3, 2), np.arange(3)).map(lambda e: (e[0] + 1, e[1]))
        split = split.map(lambda example: {"sum": example[0].sum(), "label": example[1]})
        assert split.load(np.array([2, 0]), 0, 0).examples["sum"].tolist() == [11, 3]

    def test_random_numbers_depend_on_the_position(self) -> None:
        split = data.from_arrays(np.zeros((8, 2)), np.arange(8)).random_map(lambda e, rng: (rng.random(), e[1]))
        whole = split.load(np.arange(6), 3, 10).examples[0]
        parts = [split.load(np.arange(start, start + 2), 3, 10 + start).examples[0] for start in (0, 2, 4)]
        np.testing.assert_array_equal(whole, np.concatenate(parts))
        assert len(set(whole)) == 6
        assert set(whole).isdisjoint(split.load(np.arange(6), 4, 10).examples[0])

    def test_an_exception_names_example_and_line(self) -> None:
        split = data.from_arrays(np.zeros((8, 2)), np.arange(8)).map(lambda example: 1 // int(example[1] - 5))
        refused("example 5", split.load, np.arange(8), 0, 0)
        refused(__file__, split.load, np.arange(8), 0, 0)

    def test_a_batch_with_another_number_of_examples_is_refused(self) -> None:
        split = data.from_arrays(np.zeros((8, 2)), np.arange(8)).map(lambda example: example).as_arrays()
        short = split.collated(lambda examples: (np.zeros((len(examples) - 1, 2)), np.zeros(len(examples) - 1)))
        refused("(3, 2)", short.read_batch, 0, 3)

    def test_scaled_as_in_a_batch(self) -> None:
        images = data.mnist().train
        batch = images.map(lambda example: example).load(np.arange(4), 0, 0).examples[0]
        np.testing.assert_array_equal(batch, images.read_batch(0, 4).examples * np.float32(images.scale))
