"""Updates of flat vectors compared with the formulas in float64, for any division of the vector into ranges."""

import numpy as np
import pytest

from mpitrain import optim
from mpitrain.optim.schedule import EpochCounter

from ...support.optimizers import (
    ALL,
    ELEMENTWISE,
    GAPS,
    GROUPED,
    LAYOUT,
    SIZE,
    TRAINED,
    USED,
    Run,
    amsgrad,
    draw,
    lamb_of_amsgrad,
    lars_of_amsgrad,
    reference,
    reference_of_groups,
    weights,
)


@pytest.mark.parametrize("optimizer", ALL, ids=str)
def test_many_steps_follow_the_formula(optimizer):
    run = Run(optimizer, np.float64)
    gradients = [draw(step + 1) for step in range(12)]
    for step, gradient in enumerate(gradients):
        run.step(gradient[np.newaxis], step)
    np.testing.assert_allclose(run.params, reference(optimizer, gradients), rtol=1e-9, atol=1e-10)
    assert not run.everything().reshape(-1, SIZE)[:, GAPS].any()


@pytest.mark.parametrize("optimizer", ALL, ids=str)
def test_float32_differs_from_float64_by_rounding_only(optimizer):
    run = Run(optimizer)
    gradients = [draw(step + 1) for step in range(12)]
    for step, gradient in enumerate(gradients):
        run.step(gradient.astype(np.float32)[np.newaxis], step)
    np.testing.assert_allclose(run.params, reference(optimizer, gradients), rtol=2e-5, atol=2e-5)
    assert run.everything().dtype == np.float32


@pytest.mark.parametrize("optimizer", GROUPED, ids=str)
@pytest.mark.parametrize("bounds", [(0, SIZE), (0, 1, 700, 5361, TRAINED - 30, SIZE)], ids=["whole", "ranges"])
def test_groups_follow_the_formula_with_their_own_options(optimizer, bounds):
    run = Run(optimizer, np.float64)
    gradients = [draw(step + 1) for step in range(12)]
    for step, gradient in enumerate(gradients):
        run.step(gradient[np.newaxis], step, bounds)
    np.testing.assert_allclose(run.params, reference_of_groups(optimizer, gradients), rtol=1e-9, atol=1e-10)
    assert not run.everything().reshape(-1, SIZE)[:, GAPS].any()


def test_groups_of_a_rule_that_is_not_compiled():
    groups = {"dense2.*": {"beta1": 0.5, "learning_rate": 0.3}, "*.bias": {"weight_decay": 0.5}}
    grouped = Run(amsgrad(0.1, groups=groups), np.float64)
    alone = {"dense1.weight": Run(amsgrad(0.1), np.float64), "dense2.bias": Run(amsgrad(0.3, 0.5), np.float64)}
    alone["dense1.bias"] = Run(amsgrad(0.1, weight_decay=0.5, decay_names="*"), np.float64)
    for step in range(4):
        for run in (grouped, *alone.values()):
            run.step(draw(step + 1)[np.newaxis], step)
    found = LAYOUT.views(grouped.params)
    for name, run in alone.items():
        assert np.array_equal(found[name], LAYOUT.views(run.params)[name])


def test_the_schedule_of_a_group_counts_epochs():
    optimizer = optim.sgd(1.0, groups={"*.bias": {"learning_rate": optim.by_epoch(optim.piecewise([2], [0.5, 0.1]))}})
    of_bias = optimizer.for_epochs(EpochCounter(10, 1)).by_name("dense1.bias")
    assert [of_bias.rate(step) for step in (0, 19, 20)] == [0.5, 0.5, 0.1]


@pytest.mark.parametrize("cls", [lamb_of_amsgrad, lars_of_amsgrad])
def test_every_rule_can_be_combined_with_a_trust_ratio(cls):
    """A parameter that matches ``decay_names`` takes the scaled step of the formula; one that does not also changes."""
    optimizer = cls(0.1, weight_decay=0.2)
    optimizer.check()
    run, p, gradient = Run(optimizer, np.float64), LAYOUT.views(draw(0))["dense1.weight"], draw(1)
    run.step(gradient[np.newaxis], 0)
    direction = LAYOUT.views(gradient)["dense1.weight"]
    if cls is lars_of_amsgrad:
        norm = np.linalg.norm(direction) + 0.2 * np.linalg.norm(p)
        scaled = 0.1 * (0.1 * np.linalg.norm(p) / norm) * (direction + 0.2 * p)
        step = 0.1 * scaled / (0.1 * np.abs(scaled) + 1e-8)  # the first step of amsgrad with rate 1
    else:
        step = 0.1 * direction / (0.1 * np.abs(direction) + 1e-8) + 0.2 * p
        step *= 0.1 * np.linalg.norm(p) / np.linalg.norm(step)
    found = LAYOUT.views(run.params)
    np.testing.assert_allclose(found["dense1.weight"], p - step, rtol=1e-9, atol=1e-9)
    assert (found["dense1.bias"] != LAYOUT.views(draw(0))["dense1.bias"]).all()


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_result_is_the_same_bits_however_the_vector_is_cut(optimizer, dtype):
    moving = optim.moving_average(0.9)
    whole, cut = Run(optimizer, dtype, moving), Run(optimizer, dtype, moving)
    for step in range(3):
        rows = draw(step + 1, 3).astype(dtype)
        whole.step(rows, step)
        cut.step(rows, step, [0, 1, 4, 21, 2048, 2049, 4500, TRAINED - 3, TRAINED + 2, SIZE])
    assert np.array_equal(whole.everything(), cut.everything())


@pytest.mark.parametrize("optimizer", ALL[len(ELEMENTWISE) :], ids=str)
def test_norms_are_of_whole_parameters_though_ranges_cut_them(optimizer):
    whole, cut = Run(optimizer, np.float64), Run(optimizer, np.float64)
    for step in range(3):
        rows = draw(step + 1, 2)
        whole.step(rows, step)
        cut.step(rows, step, [0, 1, 700, 5000, LAYOUT.entries[1].start + 3, TRAINED - 30, SIZE])
    np.testing.assert_allclose(cut.everything(), whole.everything(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("order", [[0], [0, 1], [4, 1, 3], [6, 5, 4, 3, 2, 1, 0]], ids=str)
@pytest.mark.parametrize("clip_norm", [None, 2.0])
def test_rows_count_as_their_sum_in_the_order_given(order, clip_norm):
    optimizer = optim.adam(0.01, clip_norm=clip_norm)
    rows = draw(5, 7).astype(np.float32)
    total = rows[order[0]].copy()
    for index in order[1:]:
        total += rows[index]
    many, one = Run(optimizer), Run(optimizer)
    many.step(rows, 0, order=np.array(order))
    one.step(total[np.newaxis], 0)
    assert np.array_equal(many.everything(), one.everything())


def test_rows_may_be_those_of_a_range():
    whole, cut = Run(optim.adam(0.01)), Run(optim.adam(0.01))
    gradient = draw(1).astype(np.float32)[np.newaxis]
    whole.step(gradient, 0)
    for lo, hi in ((0, 48), (48, SIZE)):
        cut.updater.update(lo, hi, gradient[:, lo:hi].copy(), 0, origin=lo)
    assert np.array_equal(whole.everything(), cut.everything())


def test_a_rate_may_be_scaled_and_a_gradient_clipped_from_outside():
    gradient = draw(1).astype(np.float32)[np.newaxis]
    slow, scaled = Run(optim.sgd(0.05)), Run(optim.sgd(0.1))
    slow.step(gradient, 0)
    scaled.updater.update(0, SIZE, gradient, 0, rate_scale=0.5)
    assert np.array_equal(slow.params, scaled.params)
    clipped, free = Run(optim.sgd(0.1)), Run(optim.sgd(0.1))
    clipped.updater.update(0, SIZE, gradient, 0, clip=0.0)
    free.step(gradient, 0)
    assert np.array_equal(clipped.params[:TRAINED], draw(0).astype(np.float32)[:TRAINED])
    assert np.array_equal(clipped.params[TRAINED:], free.params[TRAINED:])


def test_rows_may_be_longer_than_the_vector_and_own_may_be_one_of_them():
    optimizer = optim.sgd(1.0, clip_norm=0.1)
    padded = np.full((2, SIZE + 9), np.nan)
    padded[:, :SIZE] = draw(3, 2)
    run, other = Run(optimizer, np.float64), Run(optimizer, np.float64)
    other.step(padded[:, :SIZE].copy(), 0)
    sums = run.updater.prepare(0, SIZE, padded, padded[1], 0)
    run.updater.finish(0, SIZE, padded[1], sums, 0)
    assert np.array_equal(run.params, other.params)


def test_clipping_leaves_a_short_gradient_and_the_state_alone():
    gradient = draw(1)
    length = np.linalg.norm(gradient[:TRAINED])
    runs = [Run(optim.sgd(1.0, clip_norm=c), np.float64) for c in (None, 1.01 * length, 0.5 * length)]
    for run in runs:
        run.step(gradient[np.newaxis], 0)
    free, loose, tight = (run.params - draw(0) for run in runs)
    assert np.array_equal(free, loose)
    np.testing.assert_allclose(tight[:TRAINED], free[:TRAINED] / 2, atol=1e-14)
    assert np.array_equal(tight[TRAINED:], free[TRAINED:])


def test_clipping_shows_a_gradient_that_is_not_finite():
    for bad in (np.inf, np.nan):
        run = Run(optim.sgd(1.0, clip_norm=1.0))
        rows = draw(1).astype(np.float32)[np.newaxis]
        rows[0, 7] = bad
        run.step(rows, 0)
        assert np.isnan(run.params[7])


@pytest.mark.parametrize("optimizer", [optim.lamb(0.1), optim.lars(0.1)], ids=str)
def test_parameters_that_are_all_zeros_leave_zero(optimizer):
    run = Run(optimizer, np.float64)
    run.params[:] = 0
    run.step(draw(1)[np.newaxis], 0)
    trained = USED[USED < TRAINED]
    assert np.isfinite(run.params).all() and (run.params[trained] != 0).all()


@pytest.mark.parametrize("optimizer", [optim.lamb(0.1), optim.lars(0.1), optim.adam(0.1), optim.rmsprop(0.1)], ids=str)
def test_no_gradient_moves_nothing(optimizer):
    run = Run(optimizer, np.float64)
    before = draw(0)
    if isinstance(optimizer, optim.lamb):
        before *= 1 - 0.1 * np.isin(np.arange(SIZE), weights())  # decay only: the trust ratio cancels its factor
    run.step(np.zeros((1, SIZE)), 0)
    np.testing.assert_allclose(run.params, before, rtol=1e-12)


@pytest.mark.parametrize("decayed", [{"l2": 0.5}, {"weight_decay": 0.5}])
def test_decay_shrinks_the_named_parameters_only(decayed):
    run = Run(optim.sgd(0.1, **decayed), np.float64)
    run.step(np.zeros((1, SIZE)), 0)
    expected = draw(0)
    expected[weights()] *= 1 - 0.1 * 0.5
    np.testing.assert_allclose(run.params, expected, rtol=1e-14)


@pytest.mark.parametrize("optimizer", ALL, ids=str)
def test_state_is_added_to_and_nothing_else(optimizer):
    run = Run(optimizer, np.float64)
    rows = draw(1, 2)
    run.step(rows, 0)
    assert np.array_equal(run.params[TRAINED:], draw(0)[TRAINED:] + (rows[0] + rows[1])[TRAINED:])
    assert not any(slot[TRAINED:].any() for slot in run.slots.values())


@pytest.mark.parametrize("optimizer", [*ALL, amsgrad(0.1, weight_decay=0.1, decay_names="*")], ids=str)
@pytest.mark.parametrize("moving", [None, optim.moving_average(0.9)], ids=str)
@pytest.mark.parametrize("index", [0, 1, 3])
def test_the_gradient_of_a_frozen_parameter_does_not_count(optimizer, moving, index: int):
    """Workers may compute a gradient before they freeze the parameter. Other parameters and the state still change."""
    run, before, entry = Run(optimizer, np.float64, moving), draw(0), LAYOUT.entries[index]
    run.frozen[index] = 1
    rows = draw(1, 2)
    rows[:, entry.start : entry.stop] = np.nan
    run.step(rows, 0)
    assert entry.kind == "param"
    for vector in (run.params,) if moving is None else (run.params, run.average):
        assert np.array_equal(LAYOUT.views(vector)[entry.name], LAYOUT.views(before)[entry.name])
    assert not any(LAYOUT.views(slot)[entry.name].any() for slot in run.slots.values())
    others = np.delete(np.arange(SIZE), np.arange(entry.start, entry.stop))
    changed = Run(optimizer, np.float64, moving)
    changed.step(np.where(np.isin(np.arange(SIZE), others), rows, 0.0), 0)
    assert np.array_equal(run.params[TRAINED:], changed.params[TRAINED:]) and np.isfinite(run.params).all()


@pytest.mark.parametrize("moving", [optim.moving_average(0.9), optim.moving_average(0.5, warm_up=False)], ids=str)
@pytest.mark.parametrize("optimizer", [optim.adam(0.05), optim.lars(0.1), optim.sgd(0.1, clip_norm=1.0)], ids=str)
def test_the_moving_average_follows_the_parameters(moving, optimizer):
    run = Run(optimizer, np.float64, moving)
    gradients = [draw(step + 1) for step in range(12)]
    for step, gradient in enumerate(gradients):
        run.step(gradient[np.newaxis], step, [0, 100, SIZE])
    np.testing.assert_allclose(run.average, reference(optimizer, gradients, moving), rtol=1e-9, atol=1e-10)
    assert np.array_equal(run.average[TRAINED:], run.params[TRAINED:])


def test_the_decay_of_a_young_average_is_smaller():
    assert optim.moving_average(0.99).decay_at(0) == 0.1
    assert optim.moving_average(0.99).decay_at(10**6) == 0.99
    assert optim.moving_average(0.99, warm_up=False).decay_at(0) == 0.99


def test_an_empty_range_is_nothing_to_do():
    for optimizer in ALL:
        run = Run(optimizer)
        before = run.everything()
        rows = draw(1, 2).astype(np.float32)
        run.step(rows, 0, [0, 0])
        run.step(rows, 0, [SIZE, SIZE])
        assert np.array_equal(run.everything(), before)
