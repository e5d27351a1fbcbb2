"""The reports that the ``Log`` hook prints; all reports are recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.plan.progress import ConsistentPoint
from mpitrain.strategy.base import Stats
from mpitrain.training import hooks


class Loop:
    """A training loop that keeps the steps of the printed and of the recorded reports."""

    def __init__(self) -> None:
        self.step, self.training_s, self.validation_step = 0, 0.0, -1
        optimizer = SimpleNamespace(rate=lambda step: 0.1)
        self.cluster = SimpleNamespace(chief=True)
        self.plan = SimpleNamespace(step_examples=1, nbytes=4, optimizer=optimizer)
        self.printed: list[int] = []
        self.recorded: list[int] = []

    def report(self, step: int, values: dict[str, float], show: bool = True, record: bool = True) -> None:
        if show:
            self.printed.append(step)
        if record:
            self.recorded.append(step)


def reports(
    monkeypatch: pytest.MonkeyPatch, every_s: float, n: int, validated_at: int = -1
) -> tuple[list[int], list[int]]:
    """Return the printed and the recorded steps of a run of ``n`` steps, one second each."""
    loop = Loop()
    monkeypatch.setattr(hooks.time, "monotonic", lambda: 1000.0 + loop.step)
    strategy: Any = SimpleNamespace(stats=lambda: Stats(loop.step, 0.0, loop.step, 0, []))
    log = hooks.Log(2, every_s, strategy)
    log.begin(loop)
    for loop.step in range(1, n + 1):
        loop.training_s = float(loop.step)
        log.after_step(loop)
        if loop.step == validated_at:
            loop.validation_step = validated_at
        log.at_consistent_point(loop, ConsistentPoint(loop.step, 0, False, last=loop.step == n))
    log.end(loop)
    return loop.printed, loop.recorded


@pytest.mark.parametrize(
    ("every_s", "n", "printed"),
    [
        (0, 7, [2, 4, 6]),
        (5, 19, [2, 8, 14, 18]),
        (5, 20, [2, 8, 14, 20]),
        (100, 2, [2]),
        (100, 9, [2, 8]),
        (100, 1, []),
    ],
)
def test_printed_reports(monkeypatch: pytest.MonkeyPatch, every_s: float, n: int, printed: list[int]) -> None:
    assert reports(monkeypatch, every_s, n) == (printed, list(range(2, n + 1, 2)))


@pytest.mark.parametrize(("validated_at", "printed"), [(7, [2, 8]), (8, [2, 8]), (9, [2])])
def test_no_report_is_printed_after_a_later_validation(
    monkeypatch: pytest.MonkeyPatch, validated_at: int, printed: list[int]
) -> None:
    assert reports(monkeypatch, 100, 9, validated_at) == (printed, [2, 4, 6, 8])
