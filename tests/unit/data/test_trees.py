"""Batches of examples that differ: one line with both examples, in either order, in every collation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import data
from mpitrain.errors import DataError

DIFFERENT: list[tuple[Any, Any]] = [
    ({"a": 1}, {"a": 1, "b": 2}),
    ({"a": {"b": 1}}, {"a": {"c": 1}}),
    ((1.0, 2), (1.0, 2, 3)),
    ((1.0, 2), [1.0, 2]),
    ((1.0, 2), {"a": 1}),
    (1, 1.5),
    (1, True),
    (1, "1"),
    ("1", b"1"),
    (1.0, None),
    (np.float32([1]), np.int64([1])),
    (np.float32([1]), np.float32([1, 2])),
    ([1, 2], [1, 2, 3]),
    ([1, 2], [1, None]),
    (["a"], [1]),
    (np.uint64([2**63]), np.int64([-1])),
]


@pytest.mark.parametrize("pair", DIFFERENT, ids=repr)
@pytest.mark.parametrize("turn", [1, -1])
def test_examples_that_differ_are_both_named(pair: tuple[Any, Any], turn: int) -> None:
    first, second = pair[::turn]
    split = data.dataset([first, first, second, first])
    with pytest.raises(DataError) as caught:
        split.load(np.arange(4), 0, 0)
    text = str(caught.value)
    assert "example 0" in text and "\n" not in text
    assert "example 2" in text or "None" in repr(first)  # the first example cannot be in any batch


@pytest.mark.parametrize("value", [None, object(), [1, None], np.ma.masked_equal([1, 2], 2), [b"a"]])
def test_an_element_that_cannot_be_stacked(value: Any) -> None:
    with pytest.raises(DataError) as caught:
        data.dataset([(value, 1), (value, 2)]).load(np.arange(2), 0, 0)
    text = str(caught.value)
    assert "\n" not in text and text.count("example 0 ") < 2


def test_widths_may_differ() -> None:
    for first, second in [(np.float32([1]), np.float64([0.1])), (np.uint8([1]), np.int64([-1])), ("a", "bcd")]:
        for pair in ((first, second), (second, first)):
            batch = data.dataset([*pair]).load(np.arange(2), 0, 0).examples
            assert [*batch] == [*pair]
