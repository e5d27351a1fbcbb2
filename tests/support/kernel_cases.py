"""Every operation on a GPU against that on the CPU. Collected twice: emulated, and in tests/gpu on a device.

A module that imports these tests has a fixture ``device``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpitrain.core import ops
from mpitrain.gpu import ops as launch
from mpitrain.gpu.ops import updates
from mpitrain.optim import rules

RELATIVE = {"float32": 1e-5, "float64": 1e-12}
DTYPES = [np.float32, np.float64]
SIZES = [1, 3, 31, 257, 5000]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
NARROW = [np.float16, ml_dtypes.bfloat16]
each_narrow = pytest.mark.parametrize("dtype", NARROW, ids=["float16", "bfloat16"])
each_stored = pytest.mark.parametrize("dtype", [*DTYPES, *NARROW], ids=lambda dtype: np.dtype(dtype).name)
WHOLE = [np.uint8, np.int64, np.uint64]
EPSILON = {**RELATIVE, "float16": 2**-10, "bfloat16": 2**-7}


BUFFER = "buffer"  # as the last argument: a function that makes arrays of the first one's type


@dataclass
class Device:
    """Where the launch functions are to run.

    Attributes:
        places: Arguments for ``launch.use``; all must give the same bits.
        put: Copies an array there, to an address that is so many elements after an aligned one.
        get: Copies one from there.
    """

    places: Sequence[Any]
    put: Callable[[np.ndarray, int], Any]
    get: Callable[[Any], np.ndarray]

    def run(self, name: str, arguments: Sequence[Any], shift: int = 0) -> list[Any]:
        """What the function returns, if anything, and then its arrays as it left them; ``BUFFER`` makes new ones.

        Args:
            shift: Arrays begin so many elements after an aligned address.
        """
        runs = [self._run(place, name, arguments, shift) for place in self.places]
        for other in runs[1:]:
            for one, two in zip(runs[0], other, strict=True):
                assert one is two is None or one.tobytes() == two.tobytes(), "two runs differ"
        return runs[0]

    def _run(self, place: Any, name: str, arguments: Sequence[Any], shift: int) -> list[Any]:
        launch.use(place)
        moved = [self.put(a, shift) if isinstance(a, np.ndarray) else a for a in arguments]
        if arguments[-1] is BUFFER:
            dtype = arguments[0].dtype
            moved[-1] = lambda tag, shape: self.put(np.zeros(shape, dtype), shift)
        operation = getattr(launch, name, None) or getattr(updates, name)
        result = operation(*moved)
        results = [] if result is None else result if isinstance(result, tuple) else [result]
        arrays = [a for a, given in zip(moved, arguments, strict=True) if isinstance(given, np.ndarray)]
        return [None if a is None else self.get(a) for a in (*results, *arrays)]

    def check(self, name: str, *arguments: Any, shift: int = 0) -> None:
        """Compare all that the CPU's operation returns and leaves in its arrays."""
        found = self.run(name, arguments, shift)
        copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        result = getattr(ops, name)(*copies)
        expected = ([] if result is None else [np.array(result, np.float64)]) + [
            a for a in copies if isinstance(a, np.ndarray)
        ]
        dtypes = {a.dtype.name for a in expected}
        relative = RELATIVE["float32" if any(a.dtype == np.float32 for a in copies if _is_array(a)) else "float64"]
        assert dtypes
        for one, two in zip(found, expected, strict=True):
            assert one.shape == two.shape and one.dtype == two.dtype
            size = np.abs(two[np.isfinite(two)]).max(initial=0) if two.dtype.kind == "f" else 0
            np.testing.assert_allclose(one, two, rtol=relative, atol=relative * size)

    def check_narrow(self, name: str, *arguments: Any) -> None:
        """The same, with arrays of 16 bits among the arguments: the CPU gets all numbers in float64."""
        found = self.run(name, arguments)
        dtypes = [a.dtype for a in arguments if _is_array(a)]
        wide = [a.astype(np.float64) if _is_array(a) and a.dtype not in WHOLE else a for a in arguments]
        result = getattr(ops, name)(*wide)
        expected = [a for a in wide if _is_array(a)]
        if result is not None:
            dtypes, expected = [np.dtype(np.float32), *dtypes], [np.array(result, np.float64), *expected]
        for one, two, dtype in zip(found, expected, dtypes, strict=True):
            if dtype in WHOLE:
                np.testing.assert_array_equal(one, two)
            else:
                assert_near(one, two, np.float32 if dtype == np.float64 else dtype)


def assert_near(found: np.ndarray, expected: np.ndarray, dtype: Any) -> None:
    """Within what the type rounds; NaN where NaN is expected."""
    epsilon = EPSILON[np.dtype(dtype).name]
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=0)
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=epsilon, atol=min(epsilon, 1e-2) * largest)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def draw(shape: Any, dtype: Any, seed: int = 0, special: bool = False) -> np.ndarray:
    """Normal numbers; with NaN, infinities and zeros among them where ``special``."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape).astype(dtype)
    if special:
        flat = values.reshape(-1)
        some = rng.permutation(flat.size)[: flat.size // 10 + 1]
        flat[some] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], len(some))
    return values


# Activations.


def buffer(tag: str, shape: Any) -> np.ndarray:
    """Memory for an operation on the CPU."""
    return np.zeros(shape)


def real_of(dtype: Any) -> Any:
    """The type of scalars and parameters that go with activations of this one."""
    return np.float64 if dtype == np.float64 else np.float32


def kept_by_cpu(kept: np.ndarray | None, name: str) -> Any:
    """What the CPU needs for backward, from what a device has kept, rounded."""
    wide = None if kept is None else kept.astype(np.float64)
    return ops.activate(wide, name, 0.1, False, buffer)[1] if name == "gelu" else wide


@each_stored
@pytest.mark.parametrize("name", launch.ACTIVATIONS)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("n", SIZES)
def test_activations(device: Device, n: int, shift: int, in_place: bool, name: str, dtype: Any) -> None:
    x, dy = (draw(n, real_of(dtype), seed, special=True).astype(dtype) for seed in range(2))
    y, kept, *_ = device.run("activate", (x, name, 0.1, in_place, BUFFER), shift)
    with np.errstate(invalid="ignore"):
        assert_near(y, ops.activate(x.astype(np.float64), name, 0.1, False, buffer)[0], dtype)
        *_, dx = device.run("activate_backward", (kept, name, 0.1, dy), shift)
        expected = dy.astype(np.float64)
        ops.activate_backward(kept_by_cpu(kept, name), name, 0.1, expected)
        assert_near(dx, expected, dtype)
        _, _, total = device.run("add", (x, dy, np.zeros_like(x)), shift)
        assert_near(total, x.astype(np.float64) + dy.astype(np.float64), dtype)


@each_dtype
def test_gelu_in_the_left_tail(device: Device, dtype: Any) -> None:
    x = np.linspace(-12, 5, 100).astype(dtype)
    y, *_ = device.run("activate", (x, "gelu", 0.0, False, BUFFER))
    expected, _ = ops.activate(x, "gelu", 0.0, False, lambda tag, shape: np.zeros(shape, dtype))
    relative = 20 * RELATIVE[x.dtype.name]  # of each by itself, however small
    np.testing.assert_allclose(y, expected, rtol=relative, atol=1e-37)


@each_stored
@pytest.mark.parametrize("name", launch.ACTIVATIONS)
@pytest.mark.parametrize(
    ("rows", "columns", "shift"), [(1, 1, 0), (3, 5, 0), (70, 33, 1), (33, 64, 0), (9, 1030, 0), (5000, 8, 0)]
)
def test_bias_and_activation(device: Device, rows: int, columns: int, shift: int, name: str, dtype: Any) -> None:
    real = real_of(dtype)
    product, dy = (draw((rows, columns), real, seed).astype(dtype) for seed in (0, 1))
    bias = draw(columns, real, 2)
    y, kept, *_ = device.run("add_bias", (product, bias, name, 0.1, BUFFER), shift)
    assert_near(y, ops.add_bias(product.astype(np.float64), bias, name, 0.1, buffer)[0], dtype)
    arguments = kept, name, 0.1, dy, np.full(columns, np.nan, real)
    *_, found, sums = device.run("add_bias_backward", arguments, shift)
    dz, total = dy.astype(np.float64), np.zeros(columns)
    ops.add_bias_backward(kept_by_cpu(kept, name), name, 0.1, dz, total)
    assert_near(found, dz, dtype)
    assert_near(sums, total, real)


# optim/rules.py

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
        copies = [a.copy() if _is_array(a) else a for a in arguments]
        rules.update_segments(*copies, 0.25, scratch)
        for one, two in zip(found, [a for a in copies if _is_array(a)], strict=False):
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
        moved = [device.put(a, 0) if _is_array(a) else a for a in arguments]
        updates.update_segments(*moved, **there)
        return [device.get(moved[i]) for i in (9, 10, 11)]

    for one, two in zip(changed(go=0.0), (params, slot0, slot1), strict=True):
        np.testing.assert_array_equal(one, two)
    halved = [a.copy() if _is_array(a) else a for a in arguments]
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


# Losses.


@each_dtype
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (3, 2), (257, 10), (33, 100), (5, 1025)])
def test_softmax(device: Device, rows: int, classes: int, special: bool, dtype: Any) -> None:
    outputs = 5 * draw((rows, classes), dtype, special=special)
    labels = np.arange(rows) % classes
    if special:
        labels[:: rows // 3 + 1] = classes
        labels[1 :: rows // 3 + 1] = -1
    with np.errstate(invalid="ignore"):
        device.check("softmax_gradient", outputs, labels, 0.25, np.zeros_like(outputs), None)
        device.check("softmax_evaluate", outputs, labels)


@each_dtype
def test_softmax_finds_the_first_of_equal_outputs(device: Device, dtype: Any) -> None:
    outputs = np.zeros((4, 1500), dtype)
    outputs[:, [7, 900, 1200]] = 1
    for columns in (10, 1500):
        part = np.ascontiguousarray(outputs[:, :columns])
        device.check("softmax_evaluate", part, np.array([7, 0, min(900, columns - 1), 7]))


@each_dtype
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (300, 1), (70, 33), (2, 1030)])
def test_losses_of_elements(device: Device, rows: int, columns: int, special: bool, dtype: Any) -> None:
    outputs, gradient = 3 * draw((rows, columns), dtype), np.zeros((rows, columns), dtype)
    labels = np.random.default_rng(2).integers(0, 2, (rows, columns)).astype(dtype)
    if special:
        outputs[0, 0], labels[rows // 2, columns // 2] = np.inf, 2
    device.check("sigmoid_gradient", outputs, labels, 0.25, gradient, None)
    device.check("sigmoid_evaluate", outputs, labels)
    device.check("square_gradient", outputs, labels, 0.25, gradient, None)
    device.check("square_evaluate", outputs, labels)


@each_dtype
@pytest.mark.parametrize("name", ["softmax_gradient", "sigmoid_gradient", "square_gradient"])
def test_the_gradient_is_scaled_and_the_loss_is_not(device: Device, name: str, dtype: Any) -> None:
    outputs = draw((70, 5), dtype)
    labels = np.arange(70) % 5 if name == "softmax_gradient" else np.round(np.abs(draw((70, 5), dtype, 1))) % 2
    arguments = outputs, labels, 0.25, np.zeros_like(outputs)
    plain, scaled = (device.run(name, (*arguments, scale)) for scale in (None, np.array([4096.0])))
    assert plain[0] == scaled[0]
    np.testing.assert_array_equal(scaled[3], 4096 * plain[3])  # a power of two: nothing is rounded anew


@pytest.mark.parametrize("kind", [*launch.KINDS, "bool"])
def test_labels_of_every_type(device: Device, kind: str) -> None:
    outputs, labels = draw((40, 3), np.float32), np.random.default_rng(1).integers(0, 2, (40, 3))
    (found, *_), (expected, *_) = (
        device.run("sigmoid_gradient", (outputs, of_type, 1.0, np.zeros_like(outputs), None))
        for of_type in (labels.astype(kind), labels.astype(np.float32))
    )
    assert found == expected
    (found, *_), (expected, *_) = (
        device.run("softmax_evaluate", (outputs, of_type)) for of_type in (labels[:, 0].astype(kind), labels[:, 0] + 0)
    )
    np.testing.assert_array_equal(found, expected)


@each_narrow
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (257, 10), (5, 1025)])
def test_losses_of_16_bits(device: Device, rows: int, columns: int, dtype: Any) -> None:
    outputs, labels = (3 * draw((rows, columns), np.float32)).astype(dtype), np.arange(rows) % columns
    gradient, targets = np.zeros_like(outputs), (draw((rows, columns), np.float32, 1) > 0).astype(np.float32)
    device.check_narrow("softmax_gradient", outputs, labels, 0.25, gradient, None)
    device.check_narrow("softmax_evaluate", outputs, labels)
    device.check_narrow("sigmoid_gradient", outputs, targets, 0.25, gradient, None)
    device.check_narrow("sigmoid_evaluate", outputs, targets)
    device.check_narrow("square_gradient", outputs, targets, 0.25, gradient, None)
    device.check_narrow("square_evaluate", outputs, targets)


# Batches.


@each_dtype
@pytest.mark.parametrize("stored", [np.uint8, np.float32])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (257, 12), (5, 784), (2, 1025)])
def test_take(device: Device, rows: int, columns: int, stored: Any, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    examples = rng.integers(0, 256, (50, columns)).astype(stored)
    for shift in (0, 1):
        out = np.zeros((rows, columns), dtype)
        device.check("take", examples, rng.integers(0, 50, rows), 1 / 255, out, shift=shift)


@pytest.mark.parametrize("kind", [*launch.KINDS, "bool"])
def test_examples_of_every_type(device: Device, kind: str) -> None:
    examples = np.random.default_rng(0).integers(0, 100, (5, 6)).astype(kind)
    indices = np.array([4, 0, 0])
    *_, out = device.run("take", (examples, indices, 0.5, np.zeros((3, 6), np.float32)))
    np.testing.assert_array_equal(out, 0.5 * examples[indices].astype(np.float32))


# Sums.


@each_dtype
@pytest.mark.parametrize("n", SIZES)
def test_sum_rows(device: Device, n: int, dtype: Any) -> None:
    rows = draw((4, n + 3), dtype)
    for order in ([2], [3, 0], [1, 3, 0, 2]):
        arguments = rows, np.array(order), 2, n + 2, 0.3, np.zeros(n, dtype)
        device.check("sum_rows", *arguments)


# Conversions.


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("n", SIZES)
def test_cast(device: Device, n: int, shift: int, narrow: Any) -> None:
    """As ``ml_dtypes`` and NumPy round, halfway, beyond the largest and below the smallest, too; NaN stays NaN."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 1 << 32, n, np.uint32).view(np.float32)
    halfway = np.uint32(0xFFFF0000), np.uint32(0x8000)
    x[: n // 4] = (x[: n // 4].view(np.uint32) & halfway[0] | halfway[1]).view(np.float32)
    x[n // 4 : n // 2] = rng.standard_normal(n // 2 - n // 4) * 10.0 ** rng.integers(-9, 6, n // 2 - n // 4)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(narrow)
    _, found = device.run("cast", [x, np.zeros(n, narrow)], shift)
    is_nan = np.isnan(x)
    np.testing.assert_array_equal(found[~is_nan].view(np.uint16), expected[~is_nan].view(np.uint16))
    assert np.isnan(found[is_nan]).all()
    _, back = device.run("cast", [found, np.zeros(n, np.float32)], shift)
    np.testing.assert_array_equal(back, found.astype(np.float32))


@pytest.mark.parametrize("shape", [(1, 1), (31, 33), (64, 5), (3, 200)])
def test_transpose(device: Device, shape: tuple[int, int]) -> None:
    x = draw(shape, np.float32)
    for narrow in (np.float32, *NARROW):
        rounded = x.astype(narrow)
        _, found = device.run("transpose", (x, np.zeros(shape[::-1], narrow)))
        np.testing.assert_array_equal(found, rounded.T)
        _, found = device.run("transpose", (rounded, np.zeros(shape[::-1], np.float32)))
        np.testing.assert_array_equal(found, rounded.T.astype(np.float32))


# Embedding.


@each_dtype
@pytest.mark.parametrize(("vocabulary", "features"), [(1, 1), (7, 5), (40, 33), (3, 300)])
def test_embedding(device: Device, vocabulary: int, features: int, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    weight, grad = draw((vocabulary, features), dtype), np.full((vocabulary, features), np.nan, dtype)
    for count in (1, 31, 100):
        indices = rng.integers(-1, vocabulary + 1, count)
        as_real = (indices + 0.5).astype(dtype)
        as_real[0] = np.nan
        for rows in (indices, as_real):
            device.check("take_rows", weight, rows, np.zeros((count, features), dtype))
            device.check("add_rows", draw((count, features), dtype, 1), rows, grad)


@each_narrow
def test_embedding_of_16_bits(device: Device, dtype: Any) -> None:
    weight, grad = draw((40, 33), np.float32), np.full((40, 33), np.nan, np.float32)
    indices, dy = np.random.default_rng(0).integers(0, 40, 100), draw((100, 33), np.float32, 1).astype(dtype)
    device.check_narrow("take_rows", weight, indices, np.zeros_like(dy))
    device.check_narrow("add_rows", dy, indices, grad)


# Pooling.


@each_dtype
@pytest.mark.parametrize("channels", [1, 5, 40])
@pytest.mark.parametrize(("size", "stride"), [(1, 1), (2, 2), (2, 3), (3, 1), (3, 2), (5, 2)])
@pytest.mark.parametrize("shift", [0, 1])
def test_pooling(device: Device, shift: int, size: int, stride: int, channels: int, dtype: Any) -> None:
    x = np.round(2 * draw((3, 9, 7, channels), dtype))  # so that some are equal
    x.reshape(-1)[:: max(7, channels)] = np.nan
    steps = [(length - size) // stride + 1 for length in x.shape[1:3]]
    y = np.zeros((3, *steps, channels), dtype)
    place = np.full(y.shape, 255, np.uint8)
    device.check("max_pool", x, size, stride, y, place, shift=shift)
    ops.max_pool(x, size, stride, y, place)
    dy, dx = draw(y.shape, dtype, 1), np.full(x.shape, np.nan, dtype)
    device.check("max_pool_backward", dy, place, size, stride, dx, shift=shift)
    device.check("average_pool", x, size, stride, y, shift=shift)
    device.check("average_pool_backward", dy, size, stride, dx, shift=shift)


@each_narrow
@pytest.mark.parametrize("channels", [5, 40])
def test_pooling_of_16_bits(device: Device, channels: int, dtype: Any) -> None:
    x = np.round(2 * draw((3, 9, 7, channels), np.float32)).astype(dtype)
    y, dy = np.zeros((3, 4, 3, channels), dtype), draw((3, 4, 3, channels), np.float32, 1).astype(dtype)
    place, dx = np.zeros(y.shape, np.uint8), np.zeros_like(x)
    device.check_narrow("max_pool", x, 3, 2, y, place)
    ops.max_pool(x.astype(np.float64), 3, 2, y.astype(np.float64), place)
    device.check_narrow("max_pool_backward", dy, place, 3, 2, dx)
    device.check_narrow("average_pool", x, 3, 2, y)
    device.check_narrow("average_pool_backward", dy, 3, 2, dx)


# Windows of images.


@each_dtype
@pytest.mark.parametrize("channels", [1, 5, 40])
@pytest.mark.parametrize(("size", "stride", "start"), [((1, 1), (1, 1), 0), ((3, 3), (1, 1), 1), ((2, 4), (2, 3), 0)])
def test_windows(
    device: Device, size: tuple[int, int], stride: tuple[int, int], start: int, channels: int, dtype: Any
) -> None:
    x = draw((3, 8, 9, channels), dtype)
    rows, columns = ((length - of) // by + 1 for length, of, by in zip(x.shape[1:3], size, stride, strict=True))
    for first, last in ((start, rows), (start, rows - 1)):
        matrix = draw((3, last - first, columns, size[0] * size[1] * channels + 1), dtype, 1)
        device.check("copy_windows", x, first, *stride, *size, matrix)
        device.check("add_windows", matrix, first, *stride, *size, x)


@each_narrow
def test_windows_of_16_bits(device: Device, dtype: Any) -> None:
    x, matrix = (draw(shape, np.float32).astype(dtype) for shape in ((3, 8, 9, 5), (3, 6, 7, 45)))
    device.check_narrow("copy_windows", x, 0, 1, 1, 3, 3, matrix)
    device.check_narrow("add_windows", matrix, 0, 1, 1, 3, 3, x)


# Dropout.


@each_dtype
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (40, 33), (2, 1025)])
def test_dropout_is_the_same_bits(device: Device, rows: int, columns: int, dtype: Any) -> None:
    x = draw((rows, columns), dtype)
    words = [np.uint64(word) for word in (12345, 3, 2**63 + 7, round(0.7 * 2**32))]
    there = [np.array([word]) if place == 2 else word for place, word in enumerate(words)]  # the position
    found = device.run("drop", (x, np.zeros_like(x), *there, 1 / 0.7))[1]
    expected = np.zeros_like(x)
    ops.drop(x, expected, *words, 1 / 0.7)
    np.testing.assert_array_equal(found, expected)


@each_narrow
def test_dropout_of_16_bits(device: Device, dtype: Any) -> None:
    x, words = draw((40, 33), np.float32).astype(dtype), [np.uint64(word) for word in (12345, 3)]

    found = device.run("drop", (x, np.zeros_like(x), *words, np.array([7], np.uint64), np.uint64(2**31), 2.0))[1]
    expected = np.zeros(x.shape)
    ops.drop(x.astype(np.float64), expected, *words, 7, np.uint64(2**31), 2.0)
    assert_near(found, expected, dtype)


# Normalization.


@each_dtype
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 40), (7, 3), (300, 33), (65, 64), (1000, 10)])
def test_batch_norm(device: Device, rows: int, columns: int, dtype: Any) -> None:
    x, dy = 3 + draw((rows, columns), dtype), draw((rows, columns), dtype, 1)
    center, inverse, scale, shift = (1 + np.abs(draw(columns, dtype, seed)) for seed in range(2, 6))
    device.check("moment_sums", x, np.zeros(2 * columns + 1))
    device.check("normalize", x, center, inverse, scale, shift, np.zeros_like(x))
    sums = np.full((2, columns), np.nan)
    device.check("gradient_sums", x, center, inverse, dy, sums)
    means = np.random.default_rng(7).standard_normal((2, columns))
    device.check("normalize_backward", x, center, inverse, scale, means, dy)


@each_dtype
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 7), (3, 5), (100, 33), (9, 384), (9, 512), (90, 1024), (3, 1025), (2, 9000)]
)
def test_layer_norm(device: Device, rows: int, columns: int, dtype: Any) -> None:
    x, dy = 3 + draw((rows, columns), dtype), draw((rows, columns), dtype, 1)
    scale, shift = draw(columns, dtype, 2), draw(columns, dtype, 3)
    normal, inverse = np.zeros_like(x), np.zeros(rows, dtype)
    device.check("layer_norm", x, 1e-5, scale, shift, normal, inverse, np.zeros_like(x))
    ops.layer_norm(x, 1e-5, scale, shift, normal, inverse, np.zeros_like(x))
    sums = np.full((2, columns), np.nan)
    device.check("layer_norm_backward", normal, inverse, scale, dy, sums)


def test_nan_in_a_row_stays_in_its_row(device: Device) -> None:
    x = draw((3, 40), np.float64)
    x[1, 7] = np.nan
    scale = np.ones(40)
    arguments = x, 1e-5, scale, scale, np.zeros_like(x), np.zeros(3), np.zeros_like(x)
    device.check("layer_norm", *arguments)


@each_narrow
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 3), (65, 64), (3, 1030), (2, 9000)])
def test_normalization_of_16_bits(device: Device, rows: int, columns: int, dtype: Any) -> None:
    x, dy = ((mean + draw((rows, columns), np.float32, seed)).astype(dtype) for seed, mean in enumerate((3, 0)))
    center, inverse, scale, shift = (1 + np.abs(draw(columns, np.float32, seed)) for seed in range(2, 6))
    device.check_narrow("moment_sums", x, np.zeros(2 * columns + 1))
    device.check_narrow("normalize", x, center, inverse, scale, shift, np.zeros_like(x))
    sums, means = np.full((2, columns), np.nan), np.random.default_rng(7).standard_normal((2, columns))
    device.check_narrow("gradient_sums", x, center, inverse, dy, sums)
    device.check_narrow("normalize_backward", x, center, inverse, scale, means, dy)
    normal, of_rows = draw((rows, columns), np.float32, 8).astype(dtype), 1 + np.abs(draw(rows, np.float32, 9))
    device.check_narrow("layer_norm_backward", normal, of_rows, scale, dy, sums)
    if columns > 1:
        outs = np.zeros_like(x), np.zeros(rows, np.float32), np.zeros_like(x)
        device.check_narrow("layer_norm", x, 1e-5, scale, shift, *outs)
