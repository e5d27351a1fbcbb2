"""Detection of a worker that slows down the others."""

from __future__ import annotations

import pytest

from mpitrain.training.slow_workers import slow_worker


@pytest.mark.parametrize(
    ("seconds", "worker"),
    [
        ([2.0, 5.0, 2.1], 1),
        ([5.0, 2.0], 0),
        ([2.0, 3.9, 2.0], None),  # less than twice as long
        ([0.1, 1.0, 0.1], None),  # only a small part of the ten seconds
        ([5.0, 2.0, 6.0, 2.0, 2.0], 2),
        ([0.0, 9.0], 1),
    ],
)
def test_a_worker_that_takes_much_longer_is_found(seconds: list[float], worker: int | None) -> None:
    assert slow_worker(seconds, 10.0) == worker
