"""The decision whether a rank hangs, from its activity."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest

from mpitrain.core import activity
from mpitrain.core.activity import KINDS, PATIENT_LIMIT_S, SHORTEST_LIMIT_S, Activity, ActivityPage
from mpitrain.monitor.trace import span
from mpitrain.process.watchdog import Watchdog, describe

LIMIT_S, LONG_S = 100.0, 1000.0
SEEN = Activity(
    count=5,
    step=7,
    steps=7,
    kinds=("wait", "step", "forward"),
    waits_for=None,
    limit_s=LIMIT_S,
    long_limit_s=LONG_S,
    facts={},
)


def limit(seen: Activity, stopped: bool = False) -> float:
    """Return the first second at which a process without progress counts as hanging."""
    watchdog = after_steps()
    for second in range(10_000):
        if watchdog.hangs(seen, stopped, 1.0):
            return second - 1
    return math.inf


def after_steps() -> Watchdog:
    """Return a watchdog that has seen three quick steps."""
    watchdog = Watchdog()
    for step in range(4):
        assert not watchdog.hangs(replace(SEEN, count=step), False, 1.0)
    return watchdog


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
    assert limit(replace(seen, kinds=("wait", "hooks"))) == PATIENT_LIMIT_S
    assert limit(replace(seen, kinds=("wait", "step", "load"))) == PATIENT_LIMIT_S
    watchdog = after_steps()
    for second in range(300):
        # 20 s per activity; slow activities in validation or while waiting do not count.
        kinds = SEEN.kinds if second < 100 else ("wait", "hooks", "validate") if second < 200 else ("wait",)
        now = replace(SEEN, count=10 + second // (20 if second < 100 else 100), kinds=kinds)
        assert not watchdog.hangs(now, False, 1.0)
    assert watchdog.limit_s(seen, False) == pytest.approx(200, abs=11)


def test_the_first_steps_may_take_long_by_default() -> None:
    """The duration of the first steps does not affect the limit of later steps."""
    watchdog, seen = Watchdog(), replace(SEEN, limit_s=None)
    for second in range(900):
        assert not watchdog.hangs(replace(seen, count=second // 450, steps=second // 450), False, 1.0)
    assert watchdog.limit_s(replace(seen, steps=1), False) == LONG_S
    assert watchdog.limit_s(replace(seen, steps=2), False) == SHORTEST_LIMIT_S


def test_the_end_of_a_long_activity_is_progress() -> None:
    page = ActivityPage()
    child = os.fork()
    if not child:
        activity.write_to(page)
        with span("validate"):
            before = page.read().count
        os._exit(page.read().count - before)
    _, how = os.waitpid(child, 0)
    assert os.WEXITSTATUS(how) == 1


def test_a_child_of_a_rank_does_not_write_to_its_page() -> None:
    page = ActivityPage()
    child = os.fork()
    if not child:
        activity.write_to(page)
        before = page.read()
        grandchild = os.fork()
        with span("load"):
            activity.wait_for(3)
        if not grandchild:
            os._exit(0)
        os.waitpid(grandchild, 0)
        activity.wait_for(None)
        os._exit(page.read().count - before.count)
    _, how = os.waitpid(child, 0)
    assert os.WEXITSTATUS(how) == 4


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
    assert seen == Activity(6, 11, 11, ("wait", "step", "forward"), 0, 0.25, 7, {"role": "worker 3"})
    assert describe(seen) == "waiting for rank 0"


def test_every_kind_has_a_description() -> None:
    for kind in KINDS:
        assert describe(replace(SEEN, kinds=(kind,)))
