"""Parameters that arrive late are completed in the order in which the next step needs them, each once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.core.ranges import Bucket
from mpitrain.strategy.late_params import LateParams

from ...support.own_memory import OwnMemory

BUCKETS = [Bucket(20, 30), Bucket(10, 20), Bucket(0, 10)]  # last first, as backward computes them


class Sums:
    """Records the shared and completed buckets."""

    def __init__(self) -> None:
        self.shared: list[int] = []
        self.completed: list[int] = []
        self.steps = 0

    def share(self, index: int) -> None:
        self.shared.append(index)

    def complete(self, index: int) -> None:
        self.completed.append(index)

    def end_step(self) -> None:
        self.steps += 1


@pytest.fixture
def sums() -> Sums:
    return Sums()


@pytest.fixture
def late_params(sums: Any, monkeypatch: pytest.MonkeyPatch) -> LateParams:
    monkeypatch.setattr("mpitrain.comm.phase_barrier.MPI", SimpleNamespace(COMM_WORLD=SimpleNamespace(rank=0)))
    hierarchy: Any = SimpleNamespace(shared=OwnMemory(), cores=1)
    return LateParams(hierarchy, BUCKETS, sums, lambda: None)


@pytest.mark.parametrize(("stop", "completed"), [(0, []), (1, [2]), (10, [2]), (11, [2, 1]), (30, [2, 1, 0])])
def test_only_the_buckets_that_are_needed_are_awaited(
    sums: Sums, late_params: LateParams, stop: int, completed: list[int]
) -> None:
    late_params.begin()
    late_params.wait(stop)
    assert (sums.shared, sums.completed) == ([2, 1, 0], completed)
    late_params.wait_for_all()
    late_params.wait_for_all()
    assert (sums.completed, sums.steps) == ([2, 1, 0], 1)


def test_steps_follow_each_other(sums: Sums, late_params: LateParams) -> None:
    for step in range(1, 4):
        late_params.begin()
        late_params.wait(15)
        late_params.wait_for_all()
        assert sums.steps == step
    assert sums.completed == [2, 1, 0] * 3
