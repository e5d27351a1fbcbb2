"""Counts that a script passes to the methods of a ``Trainer``."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mpitrain.api.script_training import check_positive  # noqa: E402
from mpitrain.errors import JobError  # noqa: E402


@pytest.mark.parametrize("method", ["epochs", "steps"])
@pytest.mark.parametrize("count", [0, -1, 1.0, "2", None, True])
def test_a_count_is_an_integer_of_at_least_one(method: str, count: Any) -> None:
    with pytest.raises(JobError) as error:
        check_positive(method, count)
    assert repr(count) in str(error.value) and method in str(error.value)
    check_positive(method, 1)
