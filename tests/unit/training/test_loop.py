"""The records of the training loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.training.loop import Loop


def test_validations_of_a_learner_are_those_of_the_steps_of_the_common_model(monkeypatch: pytest.MonkeyPatch) -> None:
    loop: Any = Loop.__new__(Loop)
    reported: list[int] = []
    loop.validation, loop.validation_step, loop._measured = {}, -1, -1.0
    loop.report = lambda step, values: reported.append(step)
    steps = {10: 6.5, 20: 6.5, 30: 32.0}
    loop.measured = steps.__getitem__
    loop._strategy = SimpleNamespace()
    for step, validated_at, validation in (
        (10, 10, {"a": 1}),
        (20, 10, {"a": 1, "b": 1}),  # of the same parameters: no new validation
        (30, 30, {"b": 1}),
    ):
        loop._strategy.progress = SimpleNamespace(step=step)
        loop.add_validation(step, {"a" if step == 10 else "b": 1})
        assert (loop.validation_step, loop.validation) == (validated_at, validation)
        assert loop.recorded_step == (32 if step == 30 else step)
    assert reported == [7, 7, 32] and loop.measured_step == 32
