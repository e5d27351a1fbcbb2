"""Tests of operations on a GPU against those on the CPU: pooling, convolution windows, dropout and normalization.

Pytest collects these tests twice: in tests/unit/gpu with an emulated GPU, and in tests/gpu with a real GPU.

A module that imports these tests must have a fixture ``device``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.core import ops

from .kernel_device import Device, assert_near, draw, each_dtype, each_narrow

# Pooling.


@each_dtype
@pytest.mark.parametrize("channels", [1, 5, 40])
@pytest.mark.parametrize(("size", "stride"), [(1, 1), (2, 2), (2, 3), (3, 1), (3, 2), (5, 2)])
@pytest.mark.parametrize("shift", [0, 1])
def test_pooling(device: Device, shift: int, size: int, stride: int, channels: int, dtype: Any) -> None:
    x = np.round(2 * draw((3, 9, 7, channels), dtype))  # so that some elements are equal
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
        row = size[0] * size[1] * channels + (channels < 40)  # with an unused element, except for 40 channels
        matrix = draw((3, last - first, columns, row), dtype, 1)
        device.check("copy_windows", x, first, *stride, *size, matrix)
        device.check("add_windows", matrix, first, *stride, *size, x)


@each_narrow
@pytest.mark.parametrize("channels", [5, 8])
def test_windows_of_16_bits(device: Device, channels: int, dtype: Any) -> None:
    shapes = (3, 8, 9, channels), (3, 6, 7, 9 * channels)
    x, matrix = (draw(shape, np.float32).astype(dtype) for shape in shapes)
    device.check_narrow("copy_windows", x, 0, 1, 1, 3, 3, matrix)
    device.check_narrow("add_windows", matrix, 0, 1, 1, 3, 3, x)


# Dropout.


@each_dtype
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (40, 33), (5, 64), (2, 1025)])
def test_dropout_is_the_same_bits(device: Device, rows: int, columns: int, dtype: Any) -> None:
    x = draw((rows, columns), dtype)
    words = [np.uint64(word) for word in (12345, 3, 2**63 + 7, round(0.7 * 2**32))]
    there = [np.array([word]) if place == 2 else word for place, word in enumerate(words)]  # word 2 is the position
    found = device.run("drop", (x, np.zeros_like(x), *there, 1 / 0.7))[1]
    expected = np.zeros_like(x)
    ops.drop(x, expected, *words, 1 / 0.7)
    np.testing.assert_array_equal(found, expected)


@each_narrow
@pytest.mark.parametrize("columns", [33, 64])
def test_dropout_of_16_bits(device: Device, columns: int, dtype: Any) -> None:
    x, words = draw((40, columns), np.float32).astype(dtype), [np.uint64(word) for word in (12345, 3)]

    found = device.run("drop", (x, np.zeros_like(x), *words, np.array([7], np.uint64), np.uint64(2**31), 2.0))[1]
    expected = np.zeros(x.shape)
    ops.drop(x.astype(np.float64), expected, *words, 7, np.uint64(2**31), 2.0)
    assert_near(found, expected, dtype)


# Normalization.


@each_dtype
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 40), (7, 3), (300, 33), (65, 64), (1000, 10)])
def test_batch_norm(device: Device, rows: int, columns: int, dtype: Any) -> None:
    x, dy = 3 + draw((rows, columns), dtype), draw((rows, columns), dtype, 1)
    inverse, scale, shift = (1 + np.abs(draw(columns, dtype, seed)) for seed in range(3, 6))
    center = draw((2, columns), dtype, 2) * np.array([[1], [2**-10]], dtype)
    device.check("moments", x, np.zeros((3, columns)))
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
    center, (inverse, scale, shift) = draw((2, columns), np.float32, 2), 1 + np.abs(draw((3, columns), np.float32, 3))
    device.check_narrow("moments", x, np.zeros((3, columns)))
    device.check_narrow("normalize", x, center, inverse, scale, shift, np.zeros_like(x))
    sums, means = np.full((2, columns), np.nan), np.random.default_rng(7).standard_normal((2, columns))
    device.check_narrow("gradient_sums", x, center, inverse, dy, sums)
    device.check_narrow("normalize_backward", x, center, inverse, scale, means, dy)
    normal, of_rows = draw((rows, columns), np.float32, 8).astype(dtype), 1 + np.abs(draw(rows, np.float32, 9))
    device.check_narrow("layer_norm_backward", normal, of_rows, scale, dy, sums)
    if columns > 1:
        outs = np.zeros_like(x), np.zeros(rows, np.float32), np.zeros_like(x)
        device.check_narrow("layer_norm", x, 1e-5, scale, shift, *outs)
