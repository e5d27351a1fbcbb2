"""When the ``Save`` hook saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.checkpoint import Snapshot
from mpitrain.plan.progress import ConsistentPoint, Progress
from mpitrain.training import hooks
from mpitrain.training.checkpointing import Checkpoints


class Strategy:
    """Requests a pause as ``sync`` does: the point after the next step has it."""

    def __init__(self) -> None:
        self.progress, self.asked, self.saved = Progress(0, 0), False, []

    def request_pause(self) -> None:
        self.asked = True

    def snapshot(self) -> Snapshot:
        self.saved.append(self.progress.step)
        return Snapshot({}, self.progress.step, 0)


def saved_steps(monkeypatch: pytest.MonkeyPatch, every: int, every_s: float, n: int) -> list[int]:
    """Return the steps at which a run of ``n`` steps, one second each, saves."""
    now = [0.0]
    monkeypatch.setattr(hooks.time, "monotonic", lambda: now[0])
    strategy: Any = Strategy()
    hook = hooks.Save(every, every_s, strategy, dict, Checkpoints(), saved=True)
    loop = SimpleNamespace(step=0, cluster=SimpleNamespace(chief=True))
    hook.begin(loop)
    for step in range(1, n + 1):
        now[0] += 1
        requested, strategy.asked = strategy.asked, False
        loop.step, strategy.progress = step, Progress(step, 0)
        hook.after_step(loop)
        hook.at_consistent_point(loop, ConsistentPoint(step, 0, requested, last=step == n))
    return strategy.saved


def test_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert saved_steps(monkeypatch, 10, 0, 25) == [10, 20, 25]


def test_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert saved_steps(monkeypatch, 0, 9, 25) == [10, 20, 25]


def test_a_save_due_by_steps_and_by_seconds_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert saved_steps(monkeypatch, 10, 10, 25) == [10, 20, 25]
