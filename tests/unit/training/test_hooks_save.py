"""The steps at which the ``Save`` hook saves, and the ``Validate`` hook validates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.checkpoint import Snapshot
from mpitrain.plan.progress import ConsistentPoint, Progress
from mpitrain.training import hooks
from mpitrain.training.checkpointing import Checkpoints


class Strategy:
    """Returns empty snapshots, and keeps their steps."""

    def __init__(self) -> None:
        self.progress, self.saved = Progress(0, 0), []

    def snapshot(self) -> Snapshot:
        self.saved.append(self.progress.step)
        return Snapshot({}, self.progress.step, 0)


class Loop(SimpleNamespace):
    """Every step is followed by a consistent point, as in ``sync``; requests apply to the point after the next step."""

    def __init__(self) -> None:
        super().__init__(step=0, cluster=SimpleNamespace(chief=True), reasons=set(), validation={}, reported=[])

    def request_pause(self, reason: str) -> None:
        self.reasons.add(reason)

    def report(self, step: int, values: dict[str, float]) -> None:
        self.reported.append(step)

    def add_validation(self, step: int, values: dict[str, float]) -> None:
        self.report(step, values)


def run(monkeypatch: pytest.MonkeyPatch, hook: Any, loop: Loop, strategy: Any, n: int) -> None:
    """Run the hook for ``n`` steps of one second each."""
    now = [0.0]
    monkeypatch.setattr(hooks.time, "monotonic", lambda: now[0])
    hook.begin(loop)
    for step in range(1, n + 1):
        now[0] += 1
        reasons, loop.reasons = frozenset(loop.reasons), set()
        loop.step, strategy.progress = step, Progress(step, 0)
        hook.after_step(loop)
        hook.at_consistent_point(loop, ConsistentPoint(step, 0, reasons | {"another"}, last=step == n))


def test_the_same_parameters_are_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a learner, whose validations measure the common model."""
    loop, measured = Loop(), {1: 0.0, 2: 0.0, 3: 6.5, 4: 6.5, 5: 7.0}
    evaluator: Any = SimpleNamespace(evaluate=dict)
    run(monkeypatch, hooks.Validate(1, 0.0, evaluator, measured.__getitem__), loop, SimpleNamespace(), 5)
    assert loop.reported == [1, 3, 5]


def saved_steps(monkeypatch: pytest.MonkeyPatch, every: int, every_s: float, n: int) -> list[int]:
    """Return the steps at which a run of ``n`` steps, one second each, saves."""
    strategy: Any = Strategy()
    run(monkeypatch, hooks.Save(every, every_s, strategy, Checkpoints(), saved=True), Loop(), strategy, n)
    return strategy.saved


@pytest.mark.parametrize(
    ("every", "every_s", "expected"),
    [(10, 0, [10, 20, 25]), (0, 9, [10, 20, 25]), (10, 10, [10, 20, 25]), (0, 0, [25])],
)
def test_validation_by_steps_and_by_seconds(
    monkeypatch: pytest.MonkeyPatch, every: int, every_s: float, expected: list[int]
) -> None:
    loop, evaluator = Loop(), SimpleNamespace(evaluate=lambda: {"validation_loss": 0.5})
    run(monkeypatch, hooks.Validate(every, every_s, evaluator), loop, SimpleNamespace(), 25)  # type: ignore[arg-type]
    assert loop.reported == expected


def test_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert saved_steps(monkeypatch, 10, 0, 25) == [10, 20, 25]


def test_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert saved_steps(monkeypatch, 0, 9, 25) == [10, 20, 25]


def test_a_save_due_by_steps_and_by_seconds_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert saved_steps(monkeypatch, 10, 10, 25) == [10, 20, 25]
