"""Arguments of ``Trainer.epochs``, ``batches`` and ``steps``."""

from __future__ import annotations

from typing import Any

import pytest

from mpitrain.api.script_training import check_positive
from mpitrain.errors import JobError


@pytest.mark.parametrize("count", [0, -1, 1.0, "2", None, True])
def test_a_count_is_an_integer_of_at_least_one(count: Any) -> None:
    with pytest.raises(JobError) as error:
        check_positive("epochs", count)
    assert repr(count) in str(error.value)
