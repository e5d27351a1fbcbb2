"""Optimizer steps on a GPU, compared with those on the CPU.

Collected twice: emulated, and in tests/gpu on a device.

A module that imports these tests has a fixture ``device``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.gpu import ops as launch
from mpitrain.gpu.ops import updates
from mpitrain.optim import rules

from .kernel_device import RELATIVE, Device, draw, each_dtype, is_array

SEGMENTS = {
    "one": [(0, 5000, 1)],
    "short": [(0, 1, 1), (1, 4, 0)],
    "several": [(3, 70, 1), (70, 75, 0), (80, 4097, 1), (4101, 4102, 1), (4110, 4999, 0)],
}
CONSTANTS = {
    rules.SGD: (0.1, 0.0, 0.0, 0.0),
    rules.MOMENTUM: (0.1, 0.9, 0.0, 0.0),
    rules.NESTEROV: (0.1, 0.9, 0.0, 0.0),
    rules.ADAM: (0.01, 0.9, 0.99, 1e-3),
    rules.ADAGRAD: (0.1, 1e-3, 0.0, 0.0),
    rules.RMSPROP: (0.1, 0.9, 1e-3, 0.0),
}
SLOTS = {rules.SGD: 0, rules.ADAM: 2}


def vectors(dtype: Any, slots: int, rows: int, origin: int) -> tuple[np.ndarray, ...]:
    """Rows, parameters and two slots, of which there may be none."""
    size = 5003
    none = np.empty(0, dtype)
    slot = [np.abs(draw(size, dtype, seed)) if seed < slots else none for seed in range(2)]
    return draw((rows, size - origin + 2), dtype, 5), draw(size, dtype, 6), *slot


@each_dtype
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("rule", CONSTANTS)
def test_update_segments(device: Device, rule: int, segments: str, dtype: Any) -> None:
    bounds = np.array(SEGMENTS[segments], np.int64)
    # Options go through their combinations together with rules.
    for rows, origin, averaged, decays, shift in (
        (1, 0, True, True, 0),
        (2, 3, False, False, 0),
        (3, 0, True, False, 1),
    ):
        origin = min(origin, int(bounds[0, 0]))
        gradients, params, slot0, slot1 = vectors(dtype, SLOTS.get(rule, 1), rows, origin)
        average = draw(len(params), dtype, 8) if averaged else np.empty(0, dtype)
        factors = [np.random.default_rng(9).random(len(bounds)) * scale for scale in (2, decays, 0.3 * decays)]
        order = np.roll(np.arange(rows), 1)
        scratch = np.zeros(rules.BLOCK, dtype)
        arguments = (rule, CONSTANTS[rule], bounds, *factors, gradients, order, origin, params, slot0, slot1, average)
        found = device.run("update_segments", (*arguments, 0.25, scratch), shift)
        copies = [a.copy() if is_array(a) else a for a in arguments]
        rules.update_segments(*copies, 0.25, scratch)
        for one, two in zip(found, [a for a in copies if is_array(a)], strict=False):
            relative = RELATIVE[np.dtype(dtype).name]
            np.testing.assert_allclose(one, two, rtol=relative, atol=relative)


@each_dtype
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize(("directed", "normed"), [(True, True), (False, True), (False, False)])
def test_measure_segments(device: Device, directed: bool, normed: bool, segments: str, dtype: Any) -> None:
    bounds = np.array(SEGMENTS[segments], np.int64)
    for rows, shift in ((1, 0), (3, 1)):
        gradients, params, slot0, slot1 = vectors(dtype, 2 if directed else 0, rows, 0)
        gradients[:, 100:120] = 0
        slot0[100:120] = slot1[100:120] = 0
        decay, sums = np.random.default_rng(9).random(len(bounds)), np.full((len(bounds), 2), np.nan)
        constants = 0.01, 0.9, 0.99, 1e-6
        order, own = np.roll(np.arange(rows), 1), draw(len(params) + 1, dtype, 7)
        arguments = (bounds, decay, gradients, order, own, params, slot0, slot1, sums)
        expected = [a.copy() for a in arguments]
        scratch = np.zeros(rules.BLOCK, dtype)
        found = device.run("measure_segments", (directed, normed, constants, *arguments), shift)
        rules.measure_segments(directed, normed, constants, *expected, scratch)
        for one, two in zip(found, expected, strict=True):
            relative = RELATIVE[np.dtype(dtype).name]
            np.testing.assert_allclose(one, two, rtol=relative, atol=relative)


@each_dtype
def test_an_update_can_be_called_off_and_scaled(device: Device, dtype: Any) -> None:
    bounds = np.array(SEGMENTS["several"], np.int64)
    gradients, params, slot0, slot1 = vectors(dtype, 2, 1, 0)
    ones, zeros, order = np.ones(len(bounds)), np.zeros(len(bounds)), np.arange(1)
    arguments = (bounds, ones, zeros, 0.5 * ones, gradients, order, 0, params, slot0, slot1, np.empty(0, dtype), 0.0)
    arguments = (rules.ADAM, CONSTANTS[rules.ADAM], *arguments)

    def changed(**more: Any) -> list[np.ndarray]:
        launch.use(device.places[0])
        there = {name: device.put(np.array([value]), 0) if name != "rate" else value for name, value in more.items()}
        moved = [device.put(a, 0) if is_array(a) else a for a in arguments]
        updates.update_segments(*moved, **there)
        return [device.get(moved[i]) for i in (9, 10, 11)]

    for one, two in zip(changed(go=0.0), (params, slot0, slot1), strict=True):
        np.testing.assert_array_equal(one, two)
    halved = [a.copy() if is_array(a) else a for a in arguments]
    trained = np.zeros(gradients.shape[1], bool)
    for start, stop, is_trained in bounds:
        trained[start:stop] = is_trained
    halved[6][:, trained] *= 0.5
    halved[5] *= 0.25
    rules.update_segments(*halved, np.zeros(rules.BLOCK, dtype))
    for one, two in zip(changed(go=1.0, factor=0.5, rate=0.25), halved[9:12], strict=True):
        np.testing.assert_allclose(one, two, rtol=RELATIVE[np.dtype(dtype).name], atol=1e-6)


# A step's decisions.


def decide(device: Device, total: Any, state: np.ndarray, policy: str, scaled: bool = False) -> np.ndarray:
    """The state after ``decide_update``."""
    return device.run("decide_update", (np.array([2.0]), total, policy, scaled, state))[2]


@each_dtype
@pytest.mark.parametrize("policy", updates.POLICIES)
def test_a_step_is_judged_by_its_loss(device: Device, policy: str, dtype: Any) -> None:
    state = np.zeros(9)
    state[updates.SCALE] = 4
    good, bad = np.array([5], dtype), np.array([np.nan], dtype)
    state = decide(device, good, state, policy)
    assert [state[i] for i in (updates.GO, updates.UPDATED, updates.OWN, updates.TOTAL)] == [1, 1, 2, 5]
    assert state[updates.FACTOR] == 0.25 and state[updates.SCALE] == 4
    state = decide(device, bad, state, policy)
    assert state[updates.GO] == (policy == "ignore") and np.isnan(state[updates.TOTAL])
    state = decide(device, good, state, policy)
    assert state[updates.GO] == (policy != "stop"), "what comes after the step that ends the run changes nothing"


def test_the_scale_follows_overflows(device: Device) -> None:
    state, good = np.zeros(9), np.array([1.0])
    state[updates.SCALE] = 1024
    state[updates.OVERFLOW] = 1
    broken = decide(device, np.array([np.nan]), state, "skip", scaled=True)
    assert [broken[i] for i in (updates.GO, updates.SCALE)] == [0, 1024], "the scale is not to blame"
    state = decide(device, good, state, "ignore", scaled=True)
    assert [state[i] for i in (updates.GO, updates.SCALE, updates.OVERFLOW)] == [0, 512, 0]
    assert state[updates.FACTOR] == 1 / 1024, "the gradient at hand was made with the scale of before"
    state[updates.GOOD] = 1999
    state = decide(device, good, state, "stop", scaled=True)
    assert [state[i] for i in (updates.GO, updates.SCALE, updates.GOOD)] == [1, 1024, 0]


@pytest.mark.parametrize("policy", updates.POLICIES)
def test_a_gradient_that_no_scale_mends_is_as_a_loss_that_is_not_finite(device: Device, policy: str) -> None:
    state = np.zeros(9)
    state[updates.SCALE] = state[updates.OVERFLOW] = 1
    state = decide(device, np.array([1.0]), state, policy, scaled=True)
    assert state[updates.GO] == (policy == "ignore") and state[updates.SCALE] == 1
    assert np.isnan(state[updates.TOTAL]) and np.isnan(state[updates.OWN])
    assert state[updates.STOPPED] == (policy == "stop")


@each_dtype
def test_overflow_is_found(device: Device, dtype: Any) -> None:
    for place, value in ((None, 0), (0, np.inf), (4998, np.nan), (17, -np.inf)):
        values = draw(4999, dtype)
        if place is not None:
            values[place] = value
        assert device.run("find_overflow", (values, np.zeros(1)), 1)[1] == (place is not None)
    *_, noted = device.run("note_loss", (np.array([0.1]), np.zeros(1, dtype)))
    assert noted[0] == dtype(0.1)


@pytest.mark.parametrize("norm", [0.5, np.inf])
def test_scales_of_segments(device: Device, norm: float) -> None:
    """As optim.updater sets them."""
    bounds = np.array([(0, 5, 1), (8, 9, 0), (9, 20, 1), (20, 30, 1)], np.int64)
    sums = np.array([[4.0, 9.0], [0.0, 0.0], [1.0, 0.25], [0.0, 1.0]])
    decayed = np.array([1.0, 0.0, 0.0, 1.0])
    clip = min(1.0, norm / np.sqrt(10.25))
    found = device.run("clip_scales", (bounds, sums, norm, np.zeros(4)))[2]
    np.testing.assert_allclose(found, [clip, 1, clip, clip])
    arguments = (bounds, sums, decayed, 0.1, (0.5, 0.2, True), norm, 0.3, np.zeros(4), np.zeros(4))
    *_, scales, l2 = device.run("layer_scales", arguments)
    ratio = 0.5 * 2 / (clip * 3 + 0.2 * 2)
    np.testing.assert_allclose(scales, [clip * 0.1 * ratio, 1, clip * 0.1, clip * 0.1])
    np.testing.assert_allclose(l2, [0.1 * ratio * 0.3, 0, 0, 0.1 * 0.3])


def test_rules_have_the_numbers_of_the_numba_form() -> None:
    assert [getattr(rules, name.upper()) for name in updates.RULES] == list(range(len(updates.RULES)))
