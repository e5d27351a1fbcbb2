"""Tests of operations on a GPU against those on the CPU: activations, losses, batches, sums, casts and embedding.

Pytest collects these tests twice: in tests/unit/gpu with an emulated GPU, and in tests/gpu with a real GPU.

A module that imports these tests must have a fixture ``device``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.core import ops
from mpitrain.core.ops.activations import ACTIVATIONS
from mpitrain.core.sum_tree import ADD
from mpitrain.gpu import ops as launch

from .kernel_device import (
    BUFFER,
    NARROW,
    RELATIVE,
    SIZES,
    Device,
    assert_near,
    draw,
    each_dtype,
    each_narrow,
    each_stored,
)

# Activations.


def buffer(tag: str, shape: Any) -> np.ndarray:
    """Memory for an operation on the CPU."""
    return np.zeros(shape)


def real_of(dtype: Any) -> Any:
    """Return the type of scalars and parameters for activations of this type."""
    return np.float64 if dtype == np.float64 else np.float32


def kept_by_cpu(kept: np.ndarray | None, name: str) -> Any:
    """Return the array that the CPU needs for backward, from the rounded array that a device has kept."""
    wide = None if kept is None else kept.astype(np.float64)
    return ops.activate(wide, name, 0.1, False, buffer)[1] if name == "gelu" else wide


@each_stored
@pytest.mark.parametrize("name", ACTIVATIONS)
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
    relative = 20 * RELATIVE[x.dtype.name]  # relative to each value, even if it is small
    np.testing.assert_allclose(y, expected, rtol=relative, atol=1e-37)


@each_stored
@pytest.mark.parametrize("name", ACTIVATIONS)
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
    np.testing.assert_array_equal(scaled[3], 4096 * plain[3])  # scaling by a power of two is exact


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


@each_narrow
@pytest.mark.parametrize("stored", [np.uint8, np.float32])
def test_examples_of_16_bits_are_rounded_once(device: Device, stored: Any, dtype: Any) -> None:
    """The result is the same as that of scaling in float32, followed by a cast."""
    examples, indices = (100 * np.abs(draw((50, 37), np.float32))).astype(stored), np.arange(49, -1, -2)
    *_, wide = device.run("take", (examples, indices, 1 / 255, np.zeros((25, 37), np.float32)))
    *_, found = device.run("take", (examples, indices, 1 / 255, np.zeros((25, 37), dtype)))
    np.testing.assert_array_equal(found, wide.astype(dtype))


# Sums.


@each_dtype
@pytest.mark.parametrize("n", SIZES)
def test_sum_rows(device: Device, n: int, dtype: Any) -> None:
    rows = draw((4, n + 3), dtype)
    for order in ([2], [3, 0], [1, 3, 0, 2], [1, 3, ADD, 0, 2, ADD, ADD], [2, 1, 3, 0, ADD, ADD, ADD]):
        arguments = rows, np.array(order), 2, n + 2, 0.3, np.zeros(n, dtype)
        device.check("sum_rows", *arguments)


# Conversions.


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("n", SIZES)
def test_cast(device: Device, n: int, shift: int, narrow: Any) -> None:
    """Compare with ``ml_dtypes`` and NumPy, also for numbers halfway between values or out of range; NaN stays NaN."""
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
