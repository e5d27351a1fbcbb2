"""Whether a rank hangs, decided from its activity."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest

from mpitrain.core import activity
from mpitrain.core.activity import KINDS, Activity, ActivityPage
from mpitrain.monitor.trace import span
from mpitrain.process.watchdog import HOOK_LIMIT_S, SHORTEST_LIMIT_S, Watchdog, describe

LIMIT_S, LONG_S = 100.0, 1000.0
SEEN = Activity(
    count=5, step=7, kinds=("wait", "step", "forward"), waits_for=None, limit_s=LIMIT_S, long_limit_s=LONG_S, facts={}
)


def limit(seen: Activity, stopped: bool = False) -> float:
    """The first second at which a process that makes no progress hangs."""
    watchdog = Watchdog()
    for second in range(10_000):
        if watchdog.hangs(seen, stopped, 1.0):
            return second - 1
    return math.inf


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("wait", "step", "forward"), LIMIT_S),
        (("wait", "step", "backward", "update"), LIMIT_S),
        (("wait", "hooks"), LIMIT_S),
        (("wait", "hooks", "validate"), LONG_S),
        (("wait", "hooks", "validate", "forward"), LONG_S),
        (("wait", "hooks", "save"), LONG_S),
        (("start",), LONG_S),
        (("wait", "step", "forward", "compile"), LONG_S),
        (("wait",), 2 * LONG_S),
        (("wait", "step", "backward", "average"), 2 * LONG_S),
    ],
)
def test_limits_of_activities(kinds: tuple[str, ...], expected: float) -> None:
    assert limit(replace(SEEN, kinds=kinds)) == expected
    assert limit(replace(SEEN, kinds=kinds), stopped=True) == LIMIT_S
    assert limit(replace(SEEN, kinds=kinds, limit_s=0.0), stopped=True) == math.inf


def test_a_rank_that_waits_for_another_is_not_blamed() -> None:
    assert limit(replace(SEEN, waits_for=3)) == 2 * LONG_S


def test_the_default_limit_follows_the_longest_activity() -> None:
    seen = replace(SEEN, limit_s=None)
    assert limit(seen) == SHORTEST_LIMIT_S
    assert limit(replace(seen, kinds=("wait", "hooks"))) == HOOK_LIMIT_S
    assert limit(replace(seen, step=0)) == LONG_S  # how long a step takes is not known yet
    watchdog = Watchdog()
    for second in range(300):
        # 20 s per activity; what is slow in validation or while waiting does not count.
        kinds = SEEN.kinds if second < 100 else ("wait", "hooks", "validate") if second < 200 else ("wait",)
        assert not watchdog.hangs(replace(seen, count=second // (20 if second < 100 else 100), kinds=kinds), False, 1.0)
    assert watchdog.limit_s(seen, False) == pytest.approx(200, abs=11)


def test_any_new_activity_is_progress() -> None:
    watchdog = Watchdog()
    assert not any(watchdog.hangs(replace(SEEN, count=second // 90), False, 1.0) for second in range(1000))


def test_a_process_reads_another_ones_activity() -> None:
    page = ActivityPage()
    child = os.fork()
    if not child:
        activity.write_to(page)
        activity.describe(role="worker 3")
        activity.set_limits(0.25, 7)
        activity.become("wait")
        activity.set_step(11)
        activity.wait_for(0)
        span("step").__enter__()
        with span("load"):
            pass
        span("forward").__enter__()
        os._exit(0)
    os.waitpid(child, 0)
    seen = page.read()
    assert seen == Activity(4, 11, ("wait", "step", "forward"), 0, 0.25, 7, {"role": "worker 3"})
    assert describe(seen) == "waiting for rank 0"


def test_every_kind_has_a_description() -> None:
    for kind in KINDS:
        assert describe(replace(SEEN, kinds=(kind,)))
