"""Announcements as words: pairs, and whether all ranks have announced the same."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mpitrain.horovod.announcements import are_equal, pairs_of, text_of  # noqa: E402
from mpitrain.horovod.request import ReduceOp, Request  # noqa: E402


def rows_of(*announced: list[int], new: int = 0, rest: int = 0) -> np.ndarray:
    rows = np.full((len(announced), 12), rest, np.int32)
    for row, pairs in zip(rows, announced, strict=True):
        row[: 2 + len(pairs)] = [len(pairs) // 2, new, *pairs]
    return rows


def test_pairs() -> None:
    rows = rows_of([3, 0, -1, 5], [], [7, 1], rest=99)  # what follows the pairs is of an earlier cycle
    assert pairs_of(rows) == [[[3, 0], [-1, 5]], [], [[7, 1]]]


@pytest.mark.parametrize(
    ("announced", "equal"),
    [
        (([1, 0], [1, 0], [1, 0]), True),
        (([], [], []), True),
        (([1, 0], [1, 0], [2, 0]), False),
        (([1, 0], [1, 0], [1, 4]), False),
        (([1, 0], [1, 0], [1, 0, 2, 0]), False),
        (([1, 0, 2, 0], [1, 0, 2, 0], [1, 0]), False),
    ],
)
def test_equal_announcements(announced: tuple[list[int], ...], equal: bool) -> None:
    rows = rows_of(*announced)
    rows[1, 8:] = 5  # of an earlier cycle
    assert are_equal(rows) is equal
    assert not are_equal(rows_of(*announced, new=10))  # new requests have no numbers yet


def test_new_requests_as_text() -> None:
    requests = [Request("allreduce", "ä", torch.bfloat16, ((2, 3),), ReduceOp.Max, None, (0.5, 1.0)), Request("join")]
    assert [Request(*fields) for fields in pickle.loads(text_of(requests))] == requests
    assert text_of([]) == b""
