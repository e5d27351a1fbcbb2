"""Detection of a worker that slows down the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mpitrain.plan.progress import ConsistentPoint
from mpitrain.training.slow_workers import ReportSlowWorker, slow_worker


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


def test_time_in_which_others_wait_while_the_chief_saves_is_no_waiting() -> None:
    """The chief of two workers has waited for 3 s and saved for 5 s; the other one has waited for 7 s."""
    strategy, others_s = SimpleNamespace(waited_s=0.0), [0.0]
    workers = SimpleNamespace(allgather=lambda own: [own, (*own[:2], others_s[0])])
    loop = SimpleNamespace(step=0, compute_s=0.0, waiting_s=0.0, paused_s={}, cluster=SimpleNamespace(workers=workers))
    hook = ReportSlowWorker(strategy)  # type: ignore[arg-type]
    hook.begin(loop)  # type: ignore[arg-type]
    for step in (10, 2000):  # in the first steps kernels are compiled
        assert loop.waiting_s == 0
        strategy.waited_s, loop.paused_s["saving"], others_s[0] = strategy.waited_s + 3, step / 400, 7.0
        hook.at_consistent_point(loop, ConsistentPoint(step, 0, frozenset(), last=step == 2000))  # type: ignore[arg-type]
    assert loop.waiting_s == pytest.approx((3 + 7 + 5 - 0.025) / 2 - (5 - 0.025))
