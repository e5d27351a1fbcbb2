"""Counts that a script passes to ``Trainer.loader``."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mpitrain.api.train_loader import check_count  # noqa: E402
from mpitrain.errors import JobError  # noqa: E402


@pytest.mark.parametrize("count", [0, -1, 1.0, "2", None, True])
def test_a_count_is_an_integer_of_at_least_one(count: Any) -> None:
    with pytest.raises(JobError) as error:
        check_count("batch_size", count, 1)
    assert f"batch_size={count!r}" in str(error.value)


def test_the_minimum_is_valid() -> None:
    check_count("num_workers", 0, 0)
    check_count("batch_size", 1, 1)
