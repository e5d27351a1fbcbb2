"""A host is lost where no rank comes forward and it does not answer twice; one alone is not enough."""

from __future__ import annotations

import time

import pytest

from mpitrain.launcher.lost_hosts import STALL_S, LostHostDetector


@pytest.mark.parametrize(
    ("steps", "answers", "lost_at"),
    [
        ([1, 1, 1, 1], [{"b": "no"}, {"b": "no"}], 2),
        ([1, 1, 1, 1], [{"b": "no"}, {}, {"b": "no"}], None),
        ([1, 1, 2, 2], [{"b": "no"}, {"b": "no"}], None),
        ([1, 2, 3, 4], [{"b": "no"}], None),
        ([1, 1, 1, 1], [{"b": "no"}, {"a": "no"}, {"b": "no"}], None),
    ],
)
def test_a_host_is_lost(steps: list[int], answers: list[dict[str, str]], lost_at: int | None) -> None:
    asked: list[dict[str, str]] = []

    def ask() -> dict[str, str]:
        asked.append(answers[len(asked)] if len(asked) < len(answers) else {})
        return asked[-1]

    stall, found = LostHostDetector(ask, 0.0), None
    stall.lost(steps[0], 0.0)
    for number, step in enumerate(steps[1:], 1):
        questions = len(asked)
        lost = stall.lost(step, number * STALL_S)
        deadline = time.monotonic() + 0.2
        while len(asked) == questions and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        lost = stall.lost(step, number * STALL_S) or lost
        if lost and found is None:
            found = number
    stall.close()
    assert found == lost_at
