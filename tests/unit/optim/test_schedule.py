"""Schedules at their boundaries, and errors for invalid schedules."""

import math

import pytest

from mpitrain import optim
from mpitrain.errors import JobError
from mpitrain.optim.schedule import EpochCounter


def test_constant_and_plain_numbers_are_the_same():
    assert optim.sgd(0.5).rate(0) == optim.sgd(optim.constant(0.5)).rate(10**9) == 0.5


def test_exponential_decays_by_its_rate_every_decay_steps():
    smooth, stairs = optim.exponential(2.0, 0.5, 10), optim.exponential(2.0, 0.5, 10, staircase=True)
    assert [smooth(0), smooth(10), smooth(20)] == [2.0, 1.0, 0.5]
    assert smooth(5) == pytest.approx(2 * math.sqrt(0.5))
    assert [stairs(9), stairs(10), stairs(19)] == [2.0, 1.0, 1.0]


def test_piecewise_changes_at_the_boundary_itself():
    schedule = optim.piecewise([3, 5], [1.0, 0.1, 0.01])
    assert [schedule(step) for step in (0, 2, 3, 4, 5, 100)] == [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    assert optim.piecewise([], [0.3])(7) == 0.3


def test_cosine_goes_from_initial_to_final_and_stays():
    schedule = optim.cosine(1.0, 8, final=0.2)
    assert schedule(0) == 1.0
    assert schedule(4) == pytest.approx(0.6)
    assert schedule(8) == schedule(9) == schedule(10**6) == pytest.approx(0.2)


def test_polynomial_goes_from_initial_to_final_and_stays():
    assert optim.polynomial(1.0, 4)(1) == 0.75
    square = optim.polynomial(1.0, 4, final=0.5, power=2.0)
    assert [square(0), square(2), square(4), square(400)] == [1.0, 0.625, 0.5, 0.5]


def test_warm_up_rises_by_equal_steps_then_hands_over_from_step_0():
    schedule = optim.warm_up(4, optim.polynomial(1.0, 2))
    assert [schedule(step) for step in range(7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0]
    assert optim.warm_up(1, 0.3)(0) == 0.3


def test_join_lets_each_count_from_where_it_begins():
    schedule = optim.join([2, 4], [1.0, optim.polynomial(8.0, 2), lambda step: float(step)])
    assert [schedule(step) for step in range(7)] == [1.0, 1.0, 8.0, 4.0, 0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: optim.constant(-0.1), "-0.1"),
        (lambda: optim.constant(math.nan), "nan"),
        (lambda: optim.sgd("fast"), "fast"),
        (lambda: optim.exponential(1.0, 0.5, 0), "decay_steps"),
        (lambda: optim.exponential(1.0, -2, 5), "decay_rate"),
        (lambda: optim.piecewise([5, 5], [1, 1, 1]), "[5, 5]"),
        (lambda: optim.piecewise([5], [1]), "1 values"),
        (lambda: optim.piecewise([5], [1, math.inf]), "inf"),
        (lambda: optim.cosine(1.0, 2.5), "2.5"),
        (lambda: optim.polynomial(1.0, 2, power=0), "power"),
        (lambda: optim.warm_up(0, 1.0), "steps"),
        (lambda: optim.warm_up(True, 1.0), "True"),
        (lambda: optim.join([2], [1.0, -1.0]), "-1.0"),
    ],
)
def test_nonsense_is_refused_in_one_line_that_reports_what_was_given(build, names):
    with pytest.raises(JobError) as caught:
        build()
    assert names in str(caught.value) and "\n" not in str(caught.value)


def test_a_schedule_prints_as_it_was_written():
    assert repr(optim.warm_up(5, optim.cosine(0.1, 9))) == (
        "warm_up(steps=5, then=cosine(initial=0.1, decay_steps=9, final=0.0))"
    )


def test_by_epoch_counts_epochs_once_their_length_is_known() -> None:
    schedule = optim.by_epoch(optim.exponential(0.1, 0.5, 1, staircase=True))
    with pytest.raises(JobError, match="inside of by_epoch"):
        schedule(0)
    bound = optim.sgd(schedule).for_epochs(EpochCounter(25, 10))
    assert [bound.rate(step) for step in range(6)] == [0.1, 0.1, 0.1, 0.05, 0.05, 0.025]
    assert optim.sgd(0.1).for_epochs(EpochCounter(25, 10)) == optim.sgd(0.1)


def test_by_epoch_continues_at_the_epoch_of_the_examples() -> None:
    counter = EpochCounter(100, 10)
    bound = optim.sgd(optim.by_epoch(optim.polynomial(1.0, 4))).for_epochs(counter)
    before = [bound.rate(step) for step in (0, 20)]
    assert before == [1.0, 0.5]
    counter.step_examples, counter.start = 5, (20, 200)
    assert [bound.rate(step) for step in (20, 40, 60)] == [0.5, 0.25, 0.0]
    counter.start = (100, 100)
    assert bound.rate(0) == 1.0  # not more than at the beginning


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_a_warm_up_in_epochs_is_the_same_in_steps(epochs: int) -> None:
    """Also inside ``join`` and another warm-up, and the peak is never exceeded."""
    length = 8  # steps per epoch
    for in_epochs, in_steps in (
        (optim.warm_up(epochs, 0.3), optim.warm_up(epochs * length, 0.3)),
        (optim.warm_up(epochs, optim.cosine(0.3, 4)), optim.warm_up(epochs * length, optim.cosine(0.3, 4 * length))),
        (
            optim.join([2], [0.1, optim.warm_up(epochs, 0.3)]),
            optim.join([2 * length], [0.1, optim.warm_up(epochs * length, 0.3)]),
        ),
    ):
        bound = optim.sgd(optim.by_epoch(in_epochs)).for_epochs(EpochCounter(10 * length, 10))
        rates = [bound.rate(step) for step in range(8 * length)]
        assert rates == pytest.approx([in_steps(step) for step in range(8 * length)], rel=1e-12)
        assert max(rates) <= 0.3
    uneven = optim.sgd(optim.by_epoch(optim.warm_up(epochs, 0.3))).for_epochs(EpochCounter(73, 10))
    rates = [uneven.rate(step) for step in range(40)]
    assert rates == sorted(rates) and max(rates) == 0.3
