"""The account of a run's time: over several attempts, every second is counted once."""

from __future__ import annotations

import pytest

from mpitrain.monitor.goodput import Account, accounts_in, opened, total


def account(at: float, step: int, **seconds: float) -> Account:
    return Account(100.0, at, step, seconds)


EARLIER = [account(112.0, 10, start=2, steps=10), account(125.0, 20, start=2, steps=20, saving=3)]


WAITED = [*EARLIER[:1], account(121.0, 19, start=2, steps=19), account(125.0, 20, start=2, steps=8, waiting=15)]


@pytest.mark.parametrize("earlier", [EARLIER, WAITED], ids=["steps", "waiting that was found at once"])
@pytest.mark.parametrize("step", [0, 7, 15, 20, 23, 90])
@pytest.mark.parametrize("failed_at", [None, 120.0, 131.0])
@pytest.mark.parametrize("started_at", [126.0, 140.0])
def test_nothing_is_counted_twice(
    earlier: list[Account], step: int, failed_at: float | None, started_at: float
) -> None:
    now = opened(earlier, step, started_at, failed_at, 150.0)
    assert sum(now.seconds.values()) == pytest.approx(50.0)
    assert all(value >= 0 for value in now.seconds.values())
    assert (now.since, now.at, now.step) == (100.0, 150.0, step)


def test_waiting_that_was_found_at_once_is_no_step_after_the_next_start() -> None:
    now = opened(WAITED, 20, started_at=126.0, failed_at=None, now=130.0)
    assert now.seconds == pytest.approx({"start": 2 + 4, "steps": 8, "waiting": 15, "stopped": 1})


def test_steps_that_a_failure_has_lost() -> None:
    now = opened(EARLIER, 15, started_at=132.0, failed_at=131.0, now=135.0)
    assert now.seconds == pytest.approx({"start": 2 + 4, "steps": 15, "saving": 3, "repeated": 5 + 6})
    assert now.goodput == pytest.approx(15 / 35)


def test_steps_after_the_last_report_that_a_checkpoint_has_kept() -> None:
    now = opened(EARLIER, 24, started_at=132.0, failed_at=131.0, now=135.0)
    assert now.seconds["steps"] == pytest.approx(24) and now.seconds["repeated"] == pytest.approx(2)


def test_a_run_that_was_stopped_and_started_again() -> None:
    now = opened(EARLIER, 20, started_at=225.0, failed_at=None, now=228.0)
    assert now.seconds == pytest.approx({"start": 5, "steps": 20, "saving": 3, "stopped": 100})


def test_a_second_failure_before_the_next_report() -> None:
    """Steps that were lost before are not kept, although their account is in the file."""
    lost = opened(EARLIER, 10, started_at=131.0, failed_at=130.0, now=133.0)
    again = opened([*EARLIER, lost.with_more(138.0, 13, {"steps": 5})], 12, 141.0, 140.0, 143.0)
    assert again.seconds["steps"] == pytest.approx(10 + 2 * 5 / 3)
    assert sum(again.seconds.values()) == pytest.approx(43.0)


def test_a_failure_before_the_first_report() -> None:
    """Only the beginning of the first attempt is recorded: the rate of its steps follows from the failed step."""
    now = opened([account(103.0, 0, start=3)], 8, 100.0, failed_at=113.0, now=115.0, failed_step=10)
    assert now.seconds == pytest.approx({"start": 3 + 2, "steps": 8, "repeated": 2})


def test_steps_that_have_become_slower_and_ranks_that_have_hung() -> None:
    now = opened(EARLIER, 24, 100.0, failed_at=131.0, now=135.0, failed_step=25)
    assert now.seconds["steps"] == pytest.approx(20 + 4 * 6 / 5)
    now = opened(EARLIER, 24, 100.0, failed_at=185.0, now=187.0, failed_step=25)
    assert now.seconds["steps"] == pytest.approx(20 + 2 * 4) and now.seconds["repeated"] == pytest.approx(60 - 8)


def test_a_failure_before_training() -> None:
    assert opened([], 0, 100.0, failed_at=104.0, now=109.0).seconds == {"start": 9.0}


def test_a_run_that_was_scaled() -> None:
    now = opened(EARLIER, 20, started_at=100.0, failed_at=None, now=128.0)
    assert now.seconds == pytest.approx({"start": 5, "steps": 20, "saving": 3})


def test_accounts_are_recorded_and_read() -> None:
    first = opened([], 0, 100.0, None, 103.0).with_more(113.0, 7, {"steps": 10})
    assert first.goodput == pytest.approx(10 / 13) and "goodput 76.9 %" in first.describe()
    lines = [{"step": 7, "time_s": 1.0, **first.record()}, {"step": 7, "loss": 1.0}]
    assert accounts_in(lines) == [first]


def test_idle_spare_hosts_reduce_the_shares_of_the_others() -> None:
    """One of four hosts is idle."""
    now = opened([], 0, 100.0, None, 104.0).with_more(120.0, 9, {"steps": 12, "waiting": 4, "spares": 5})
    assert now.shares == pytest.approx({"start": 0.15, "steps": 0.45, "waiting": 0.15, "spares": 0.25})
    assert now.goodput == pytest.approx(0.45) and "spares 25.0 %" in now.describe()


def test_the_account_of_a_learner_has_its_own_steps() -> None:
    """The step of the line is one of all learners."""
    own = account(112.0, 10, steps=12.0)
    assert accounts_in([{"step": 400, **own.record()}]) == [own]


def test_learners_together_have_the_sums_of_their_times() -> None:
    """One of them began later, and its clock is an hour ahead."""
    later = Account(3710.0, 3720.0, 5, {"steps": 4.0, "repeated": 6.0})
    both = total([account(130.0, 20, steps=24.0, start=6.0), later])
    assert both.seconds == {"steps": 28.0, "start": 6.0, "repeated": 6.0}
    assert both.goodput == pytest.approx(28 / 40) and sum(both.shares.values()) == pytest.approx(1)
