"""Definitions of the package's rules compared with their kernels, user-defined rules, and refused arguments."""

import math
from dataclasses import dataclass, fields

import numpy as np
import pytest

from mpitrain import optim
from mpitrain.errors import JobError
from mpitrain.optim.compiled import RULES, CompiledRule

from ...support.optimizers import ALL, GAPS, SIZE, TRAINED, Run, amsgrad, draw, weights


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
        (lambda: optim.adam(0.1, groups={"*.bias": {"beta": 0.5}}), "'beta'"),
        (lambda: optim.adam(0.1, groups={"*.bias": {"clip_norm": 0.5}}), "'clip_norm'"),
        (lambda: optim.adam(0.1, groups={"*.bias": {"beta2": 1.5}}), "'*.bias': adam: beta2 is 1.5"),
        (lambda: optim.adam(0.1, groups={"*.bias": 0.5}), "'*.bias' is 0.5"),
        (lambda: optim.adamw(0.1, groups={"*.bias": {"l2": 0.5}}), "l2=0.5 and weight_decay=0.01"),
    ],
)
def test_nonsense_is_refused_in_one_line_that_reports_what_was_given(build, names):
    with pytest.raises(JobError) as caught:
        build()
    assert names in str(caught.value) and "\n" not in str(caught.value)


def uncompiled(optimizer):
    """Return the same optimizer without its kernel."""
    kind = type(optimizer)
    plain = type(kind.__name__, (kind,), {"update": kind.update})
    made = plain(**{each.name: getattr(optimizer, each.name) for each in fields(optimizer) if each.init})
    assert made.fused(0.1, 0) is None and optimizer.fused(0.1, 0) is not None
    return made


@pytest.mark.parametrize("optimizer", ALL, ids=str)
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


def test_a_compiled_rule_with_three_slots_is_refused():
    with pytest.raises(ValueError, match=r"3 slots.*optim/backend\.py"):
        CompiledRule("third", ("rate",), ("a", "b", "c"), "c += g; p -= rate * c;")
    assert "third" not in RULES
    more = type("more", (optim.momentum,), {"slots": ("velocity", "forgotten")})
    with pytest.raises(JobError, match=r"more: slots is .*'forgotten'.*compiled rule has \('velocity',\)"):
        more(0.1).check()


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
    """Return a rule whose ``update`` calls ``body`` with the parameters, the gradient and the slots."""
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
        (lambda: broken(lambda p, g, s: p.__setitem__(..., p * (1 - g)), of=optim.lamb), "must not depend on params"),
    ],
)
def test_a_bad_rule_is_refused_in_one_line(rule, names):
    with pytest.raises(JobError) as caught:
        rule().check()
    assert names in str(caught.value) and "custom" in str(caught.value) and "\n" not in str(caught.value)


def test_a_subclass_with_an_update_of_its_own_does_not_use_the_kernel_of_its_base():
    constant = broken(lambda p, g, s: p.fill(7), of=optim.adam)
    constant.check()
    run = Run(constant)
    run.step(draw(1).astype(np.float32)[np.newaxis], 0)
    assert set(run.params[:TRAINED].tolist()) == {0, 7}  # 0 in the gap between two entries of the layout
    for optimizer in ALL:
        optimizer.check()


@dataclass(frozen=True)
class layered_sgd(optim.sgd):
    layered: bool = False

    @property
    def trust_ratio(self):
        return optim.TrustRatio() if self.layered else None


@pytest.mark.parametrize("layered", [True, False])
def test_a_group_cannot_turn_the_trust_ratio_on_or_off(layered):
    with pytest.raises(JobError, match="trust ratio"):
        layered_sgd(0.1, layered, groups={"dense2.*": {"layered": not layered}})


@pytest.mark.parametrize(
    ("composed", "whole"),
    [
        (optim.adamw(0.01, layer_scaling=optim.TrustRatio()), optim.lamb(0.01)),
        (
            optim.momentum(0.1, weight_decay=0.1, layer_scaling=optim.TrustRatio(0.02, after_rule=False)),
            optim.lars(0.1, weight_decay=0.1, trust=0.02),
        ),
        (
            optim.adamw(0.01, groups={"dense1.*": {"rate_factor": 0.1, "eps": 1e-6}, "*.bias": {"rate_factor": 3}}),
            optim.adamw(0.01, groups={"dense1.*": {"eps": 1e-6}}, rate_factors={"dense1.*": 0.1, "*.bias": 3}),
        ),
    ],
    ids=["lamb", "lars", "rate_factor"],
)
def test_compositions_give_the_same_bits(composed, whole):
    runs = [Run(composed), Run(whole)]
    for step in range(4):
        for run in runs:
            run.step(draw(step + 1, 1).astype(np.float32), step)
    assert runs[0].everything().tobytes() == runs[1].everything().tobytes()


def test_a_layer_scaling_is_a_trust_ratio():
    with pytest.raises(JobError, match="layer_scaling"):
        optim.adam(0.1, layer_scaling=0.5)
