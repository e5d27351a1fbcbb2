"""Tests of optimizer steps on a GPU against those on the CPU.

Pytest collects these tests twice: in tests/unit/gpu with an emulated GPU, and in tests/gpu with a real GPU.

A module that imports these tests must have a fixture ``device``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.gpu import ops as launch
from mpitrain.gpu.ops import updates
from mpitrain.optim import compiled
from mpitrain.optim.compiled import RULES, SCRATCH

from .kernel_device import RELATIVE, Device, draw, each_dtype, is_array

SEGMENTS = {
    "one": [(0, 5000, 1)],
    "short": [(0, 1, 1), (1, 4, 0)],
    "several": [(3, 70, 1), (70, 75, 0), (80, 4097, 1), (4101, 4102, 1), (4110, 4999, 0)],
}
VALUES = (0.1, 0.9, 0.1, 0.99, 0.01, 1e-3)  # of a rule's constants


def vectors(dtype: Any, slots: int, rows: int, origin: int) -> tuple[np.ndarray, ...]:
    """Return rows of gradients, parameters and two slots; a slot with a number from ``slots`` on is empty."""
    size = 5003
    none = np.empty(0, dtype)
    slot = [np.abs(draw(size, dtype, seed)) if seed < slots else none for seed in range(2)]
    return draw((rows, size - origin + 2), dtype, 5), draw(size, dtype, 6), *slot


@each_dtype
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("name", RULES)
def test_update_segments(device: Device, name: str, segments: str, dtype: Any) -> None:
    rule, constants = RULES[name], VALUES[: len(RULES[name].constants)]
    bounds = np.array(SEGMENTS[segments], np.int64)
    # Only some combinations of the options are tested.
    for rows, origin, averaged, decays, shift in (
        (1, 0, True, True, 0),
        (2, 3, False, False, 0),
        (3, 0, True, False, 1),
    ):
        origin = min(origin, int(bounds[0, 0]))
        gradients, params, slot0, slot1 = vectors(dtype, len(rule.slots), rows, origin)
        average = draw(len(params), dtype, 8) if averaged else np.empty(0, dtype)
        factors = [np.random.default_rng(9).random(len(bounds)) * scale for scale in (2, decays, 0.3 * decays)]
        order = np.roll(np.arange(rows), 1)
        arguments = (bounds, *factors, 0.5, gradients, order, origin, params, slot0, slot1, average)
        found = device.run("update_segments", (rule, constants, *arguments, 0.25), shift)
        copies = [a.copy() if is_array(a) else a for a in arguments]
        rule.update_segments(constants, *copies, 0.25, np.zeros(SCRATCH, dtype))
        for one, two in zip(found, [a for a in copies if is_array(a)], strict=False):
            relative = RELATIVE[np.dtype(dtype).name]
            np.testing.assert_allclose(one, two, rtol=relative, atol=relative)


@each_dtype
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize(("name", "normed"), [(None, False), (None, True), *((name, True) for name in RULES)])
def test_measure_segments(device: Device, name: str | None, normed: bool, segments: str, dtype: Any) -> None:
    rule = None if name is None else RULES[name]
    constants = (0.0,) if rule is None else VALUES[: len(rule.constants)]
    bounds = np.array(SEGMENTS[segments], np.int64)
    for rows, shift in ((1, 0), (3, 1)):
        gradients, params, slot0, slot1 = vectors(dtype, 0 if rule is None else len(rule.slots), rows, 0)
        gradients[:, 100:120] = slot0[100:120] = slot1[100:120] = 0
        decay, sums = np.random.default_rng(9).random(len(bounds)), np.full((len(bounds), 2), np.nan)
        order, own = np.roll(np.arange(rows), 1), draw(len(params) + 1, dtype, 7)
        arguments = (bounds, decay, gradients, order, own, params, slot0, slot1, sums)
        expected = [a.copy() for a in arguments]
        found = device.run("measure_segments", (rule, constants, normed, *arguments), shift)
        measure = compiled.measure_gradients if rule is None else rule.measure_segments
        measure(constants, normed, *expected, np.zeros(SCRATCH, dtype))
        for one, two in zip(found, expected, strict=True):
            relative = RELATIVE[np.dtype(dtype).name]
            np.testing.assert_allclose(one, two, rtol=relative, atol=relative)


@each_dtype
def test_an_update_can_be_called_off_and_scaled(device: Device, dtype: Any) -> None:
    bounds = np.array(SEGMENTS["several"], np.int64)
    gradients, params, slot0, slot1 = vectors(dtype, 2, 1, 0)
    ones, zeros, order = np.ones(len(bounds)), np.zeros(len(bounds)), np.arange(1)
    factors = ones, zeros, 0.5 * ones, 0.25
    arguments = (*(bounds, *factors), gradients, order, 0, *(params, slot0, slot1, np.empty(0, dtype)), 0.0)
    adam = RULES["adam"]

    def changed(**numbers: float) -> list[np.ndarray]:
        launch.use(device.places[0])
        there = {name: device.put(np.array([value]), 0) for name, value in numbers.items()}
        moved = [device.put(a, 0) if is_array(a) else a for a in arguments]
        updates.update_segments(adam, VALUES, *moved, **there)
        return [device.get(vector) for vector in moved[8:11]]

    for one, two in zip(changed(go=0.0), (params, slot0, slot1), strict=True):
        np.testing.assert_array_equal(one, two)
    halved = [a.copy() if is_array(a) else a for a in arguments]
    trained = np.zeros(gradients.shape[1], bool)
    for start, stop, is_trained in bounds:
        trained[start:stop] = is_trained
    halved[5][:, trained] *= 0.5
    adam.update_segments(VALUES, *halved, np.zeros(SCRATCH, dtype))
    for one, two in zip(changed(go=1.0, factor=0.5), halved[8:11], strict=True):
        np.testing.assert_allclose(one, two, rtol=RELATIVE[np.dtype(dtype).name], atol=1e-6)


# A step's decisions.


def decide(device: Device, total: Any, state: np.ndarray, policy: str, scaled: bool = False) -> np.ndarray:
    """Return the state after ``decide_update``."""
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
    assert state[updates.GO] == (policy != "stop"), "a step after the step that ends the run changes nothing"


def test_the_scale_follows_overflows(device: Device) -> None:
    state, good = np.zeros(9), np.array([1.0])
    state[updates.SCALE] = 1024
    state[updates.OVERFLOW] = 1
    broken = decide(device, np.array([np.nan]), state, "skip", scaled=True)
    assert [broken[i] for i in (updates.GO, updates.SCALE)] == [0, 1024], "a loss of NaN does not change the scale"
    state = decide(device, good, state, "ignore", scaled=True)
    assert [state[i] for i in (updates.GO, updates.SCALE, updates.OVERFLOW)] == [0, 512, 0]
    assert state[updates.FACTOR] == 1 / 1024, "the gradient was computed with the previous scale"
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
    *_, noted = device.run("copy_loss", (np.array([0.1]), np.zeros(1, dtype)))
    assert noted[0] == dtype(0.1)
