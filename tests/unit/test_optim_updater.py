"""Optimizers on flat vectors against their formulas in float64, however the vector is cut."""

import math
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import pytest

from mpitrain import optim
from mpitrain.core.layout import Layout
from mpitrain.errors import JobError

LAYOUT = Layout.pack(
    [
        ("dense1.weight", (67, 80), "param"),
        ("dense1.bias", (67,), "param"),
        ("norm.mean", (5,), "state"),
        ("dense2.weight", (3, 1), "param"),
        ("dense2.bias", (1,), "param"),
        ("norm.var", (1,), "state"),
    ]
)
SIZE, TRAINED = LAYOUT.size, LAYOUT.n_trained
USED = np.concatenate([np.arange(e.start, e.stop) for e in LAYOUT.entries])
GAPS = np.setdiff1d(np.arange(SIZE), USED)

ELEMENTWISE = [
    optim.sgd(0.1),
    optim.sgd(optim.exponential(0.1, 0.5, 3), l2=0.05),
    optim.sgd(0.1, weight_decay=0.3),
    optim.momentum(0.05),
    optim.momentum(0.05, 0.8, nesterov=True),
    optim.nesterov(0.05, 0.8, l2=0.1, decay_names=["*.bias", "dense2.*"]),
    optim.adam(0.01),
    optim.adam(0.01, 0.8, 0.95, 1e-3, l2=0.1),
    optim.adamw(0.01, weight_decay=0.5),
    optim.adagrad(0.1),
    optim.rmsprop(0.01, 0.9),
]


def draw(seed, rows=None):
    """A vector, or rows of them, with zeros in the gaps."""
    rng = np.random.default_rng(seed)
    shape = (SIZE,) if rows is None else (rows, SIZE)
    values = rng.standard_normal(shape)
    values[..., GAPS] = 0
    return values


class Run:
    """An updater with its vectors."""

    def __init__(self, optimizer, dtype=np.float32, moving=None):
        self.params = draw(0).astype(dtype)
        self.slots = {name: np.zeros(SIZE, dtype) for name in optimizer.slots}
        self.average = None if moving is None else self.params.copy()
        self.updater = optim.Updater(optimizer, LAYOUT, self.params, self.slots, self.average, moving)

    def step(self, rows, step, bounds=(0, SIZE), order=None):
        """One step by ranges between ``bounds``, as that many ranks would take it together."""
        ranges = list(pairwise(bounds))
        if not self.updater.needs_sums:
            for lo, hi in ranges:
                self.updater.update(lo, hi, rows, step, order=order)
            return
        owns = [np.full(SIZE, np.nan, rows.dtype) for _ in ranges]
        sums = [
            self.updater.prepare(lo, hi, rows, own, step, order=order)
            for own, (lo, hi) in zip(owns, ranges, strict=True)
        ]
        assert all(part.shape == (self.updater.n_sums,) for part in sums)
        for own, (lo, hi) in zip(owns, ranges, strict=True):
            self.updater.finish(lo, hi, own, sum(sums), step)

    def everything(self):
        average = [] if self.average is None else [self.average]
        return np.concatenate([self.params, *self.slots.values(), *average])


def reference(o, gradients, moving=None):
    """The formulas as papers and PyTorch have them, in float64 on whole vectors."""
    p = draw(0)
    average = p.copy()
    m, v = np.zeros(SIZE), np.zeros(SIZE)
    decayed = np.zeros(SIZE)
    for entry in LAYOUT.entries:
        decayed[entry.start : entry.stop] = entry.kind == "param" and o.decays(entry.name)
    state = np.arange(SIZE) >= TRAINED
    for t, raw in enumerate(gradients):
        rate, g, before = o.rate(t), np.where(state, 0, raw), p.copy()
        if o.clip_norm is not None:
            g = g * min(1.0, o.clip_norm / np.linalg.norm(g))
        g = g + o.l2 * decayed * p
        if not o.layerwise:
            p = p * (1 - rate * o.weight_decay * decayed)
        if isinstance(o, optim.lars):
            u = entrywise(o, lambda w, u: o.trust * norm(w) / (norm(u) + o.weight_decay * norm(w)), p, g) * (
                g + o.weight_decay * decayed * p
            )
            m = o.momentum * m + rate * u
            p = p - m
        elif isinstance(o, optim.momentum):
            m = o.momentum * m + g
            p = p - rate * (g + o.momentum * m if o.nesterov else m)
        elif isinstance(o, optim.adam):
            m = o.beta1 * m + (1 - o.beta1) * g
            v = o.beta2 * v + (1 - o.beta2) * g * g
            u = m / (1 - o.beta1 ** (t + 1)) / (np.sqrt(v / (1 - o.beta2 ** (t + 1))) + o.eps)
            if isinstance(o, optim.lamb):
                u = u + o.weight_decay * decayed * p
                u = u * entrywise(o, lambda w, u: norm(w) / norm(u), p, u)
            p = p - rate * u
        elif isinstance(o, optim.adagrad):
            v = v + g * g
            p = p - rate * g / (np.sqrt(v) + o.eps)
        elif isinstance(o, optim.rmsprop):
            v = o.decay * v + (1 - o.decay) * g * g
            p = p - rate * g / (np.sqrt(v) + o.eps)
        else:
            p = p - rate * g
        p = np.where(state, before + raw, p)
        if moving is not None:
            decay = moving.decay_at(t)
            average = np.where(state, p, decay * average + (1 - decay) * p)
    return p if moving is None else average


def norm(x):
    return np.sqrt(np.sum(x * x))


def entrywise(o, ratio, params, direction):
    ratios = np.ones(SIZE)
    for e in LAYOUT.entries:
        if e.kind == "param" and o.decays(e.name):
            part = slice(e.start, e.stop)
            ratios[part] = ratio(params[part], direction[part])
    return ratios


ALL = [
    *ELEMENTWISE,
    optim.sgd(0.1, clip_norm=1.5),
    optim.adam(0.01, l2=0.1, clip_norm=0.5),
    optim.momentum(0.1, clip_norm=1e9),
    optim.lamb(0.01, weight_decay=0.1),
    optim.lamb(0.01, decay_names="*"),
    optim.lars(0.5, weight_decay=0.01),
    optim.lars(0.5, weight_decay=0.01, clip_norm=2.0, decay_names=["*"]),
]


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
        before *= 1 - 0.1 * np.isin(np.arange(SIZE), weights())  # decay alone: its ratio undoes its size
    run.step(np.zeros((1, SIZE)), 0)
    np.testing.assert_allclose(run.params, before, rtol=1e-12)


def weights():
    return np.concatenate([np.arange(e.start, e.stop) for e in LAYOUT.entries if e.name.endswith(".weight")])


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


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: optim.momentum(0.1, 1.0), "momentum is 1.0"),
        (lambda: optim.adam(0.1, beta2=1.5), "beta2 is 1.5"),
        (lambda: optim.adam(0.1, eps=-1e-8), "eps"),
        (lambda: optim.sgd(0.1, l2=-1), "l2 is -1"),
        (lambda: optim.sgd(0.1, l2=math.inf), "inf"),
        (lambda: optim.sgd(0.1, clip_norm=0), "clip_norm"),
        (lambda: optim.adamw(0.1, l2=0.1), "l2=0.1 and weight_decay=0.01"),
        (lambda: optim.rmsprop(0.1, decay=math.nan), "nan"),
        (lambda: optim.lamb(0.1, clip_norm=1.0), "clip_norm is 1.0"),
        (lambda: optim.lars(0.1, l2=0.1), "weight_decay"),
        (lambda: optim.moving_average(1.0), "1.0"),
    ],
)
def test_nonsense_is_refused_in_one_line_that_reports_what_was_given(build, names):
    with pytest.raises(JobError) as caught:
        build()
    assert names in str(caught.value) and "\n" not in str(caught.value)


def uncompiled(optimizer):
    """The same optimizer without its kernel."""
    kind = type(optimizer)
    plain = type(kind.__name__, (kind,), {"update": kind.update})
    made = plain(**{each.name: getattr(optimizer, each.name) for each in fields(optimizer) if each.init})
    assert made.fused(0.1, 0) is None and optimizer.fused(0.1, 0) is not None
    return made


@pytest.mark.parametrize("optimizer", [o for o in ALL if not isinstance(o, optim.lamb)], ids=str)
@pytest.mark.parametrize(("dtype", "ulps"), [(np.float32, 4), (np.float64, 4)])
def test_the_definition_of_a_rule_agrees_with_its_kernel(optimizer, dtype, ulps):
    moving = optim.moving_average(0.9)
    compiled, plain = Run(optimizer, dtype, moving), Run(uncompiled(optimizer), dtype, moving)
    for step in range(8):
        rows = draw(step + 1, 3).astype(dtype)
        compiled.step(rows, step, [0, 100, SIZE], order=np.array([2, 0]))
        plain.step(rows, step, [0, 3000, TRAINED - 3, SIZE], order=np.array([2, 0]))
        tolerance = ulps * (step + 1) * np.finfo(dtype).eps
        np.testing.assert_allclose(plain.everything(), compiled.everything(), rtol=tolerance, atol=tolerance)


def test_the_definition_of_lamb_is_the_step_of_what_it_does_not_scale():
    compiled, plain = Run(optim.lamb(0.01, decay_names=[]), np.float64), Run(uncompiled(optim.adam(0.01)), np.float64)
    for step in range(8):
        for run in (compiled, plain):
            run.step(draw(step + 1)[np.newaxis], step)
    np.testing.assert_allclose(plain.everything(), compiled.everything(), rtol=1e-13, atol=1e-14)


@dataclass(frozen=True)
class amsgrad(optim.Optimizer):
    """Reddi, Kale and Kumar, On the Convergence of Adam and Beyond, 2018, algorithm 2, without bias correction."""

    beta1: float = 0.9
    beta2: float = 0.99

    slots = ("mean", "square", "largest")

    def update(self, params, grads, slots, rate, step):
        slots["mean"] += (1 - self.beta1) * (grads - slots["mean"])
        slots["square"] += (1 - self.beta2) * (grads * grads - slots["square"])
        np.maximum(slots["largest"], slots["square"], out=slots["largest"])
        params -= rate * slots["mean"] / (np.sqrt(slots["largest"]) + 1e-8)


def reference_of_amsgrad(o, gradients):
    p, slots = draw(0), {name: np.zeros(SIZE) for name in o.slots}
    trained, decayed = np.arange(SIZE) < TRAINED, np.isin(np.arange(SIZE), weights())
    for step, raw in enumerate(gradients):
        g = np.where(trained, raw, 0)
        norm_of_it = np.linalg.norm(g)
        g = g * (1.0 if o.clip_norm is None else min(1.0, o.clip_norm / norm_of_it)) + o.l2 * decayed * p
        p = p * (1 - o.rate(step) * o.weight_decay * decayed)
        before = p.copy()
        o.update(p, g, slots, o.rate(step), step)
        p = np.where(trained, p, before + raw)
    return p


@pytest.mark.parametrize(
    "options", [{}, {"clip_norm": 0.5, "weight_decay": 0.1}, {"l2": 0.1, "clip_norm": 5.0}], ids=str
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_rule_with_three_slots(options, dtype):
    optimizer = amsgrad(optim.exponential(0.1, 0.5, 3), **options)
    optimizer.check()
    run = Run(optimizer, dtype)
    gradients = [draw(step + 1) for step in range(8)]
    for step, gradient in enumerate(gradients):
        run.step(gradient.astype(dtype)[np.newaxis], step, [0, 1, 100, 2049, TRAINED - 1, SIZE])
    tolerance = 1e-12 if dtype == np.float64 else 2e-5
    np.testing.assert_allclose(run.params, reference_of_amsgrad(optimizer, gradients), rtol=tolerance, atol=tolerance)
    assert run.everything().dtype == dtype and not run.everything().reshape(-1, SIZE)[:, GAPS].any()


def test_a_rule_is_the_same_bits_however_the_vector_is_cut():
    moving = optim.moving_average(0.9)
    optimizer = amsgrad(0.1, weight_decay=0.1)
    whole, cut = Run(optimizer, np.float32, moving), Run(optimizer, np.float32, moving)
    for step in range(3):
        rows = draw(step + 1, 3).astype(np.float32)
        whole.step(rows, step)
        cut.step(rows, step, [0, 1, 4, 21, 2048, 2049, 4500, TRAINED - 3, TRAINED + 2, SIZE])
    assert np.array_equal(whole.everything(), cut.everything())


def broken(body, of=optim.Optimizer, **attributes):
    """A rule whose method is a function of the parameters, the gradient and the slots."""
    attributes["update"] = lambda self, params, grads, slots, rate, step: body(params, grads, slots)
    return type("custom", (of,), attributes)(0.1)


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        (lambda: broken(lambda p, g, s: None, slots="mean"), "slots is 'mean'"),
        (lambda: broken(lambda p, g, s: None, slots=["mean"]), "slots is ['mean']"),
        (lambda: broken(lambda p, g, s: None, slots=("a/b",)), "slots is ('a/b',)"),
        (lambda: broken(lambda p, g, s: None, slots=("mean", "mean")), "slots is ('mean', 'mean')"),
        (lambda: broken(lambda p, g, s: None, slots=("params",)), "slots is ('params',)"),
        (lambda: broken(lambda p, g, s: p - g), "in place"),
        (lambda: broken(lambda p, g, s: s.update(mean=g), slots=("mean",)), "in place"),
        (lambda: broken(lambda p, g, s: s.update(other=g), slots=("mean",)), "in place"),
        (lambda: broken(lambda p, g, s: p.resize(3)), "ValueError"),
        (lambda: broken(lambda p, g, s: s["square"]), "KeyError: 'square'"),
        (lambda: broken(lambda p, g, s: p.__setitem__(..., g / np.linalg.norm(g))), "other elements"),
        (lambda: broken(lambda p, g, s: p.__setitem__(..., g[:2])), "ValueError"),
        (lambda: broken(lambda p, g, s: None, of=optim.lamb), "layerwise"),
    ],
)
def test_a_bad_rule_is_refused_in_one_line(rule, names):
    with pytest.raises(JobError) as caught:
        rule().check()
    assert names in str(caught.value) and "custom" in str(caught.value) and "\n" not in str(caught.value)


def test_a_subclass_with_an_update_of_its_own_does_not_use_the_kernel_of_its_base():
    gentle = broken(lambda p, g, s: None, of=optim.adam)
    gentle.check()
    run = Run(gentle)
    run.step(draw(1).astype(np.float32)[np.newaxis], 0)
    assert np.array_equal(run.params[:TRAINED], draw(0).astype(np.float32)[:TRAINED])
    for optimizer in ALL:
        optimizer.check()
