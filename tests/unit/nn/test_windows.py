"""Convolution and pooling compared with loops over every window, for various blocks, strides and paddings."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.core.device import Cpu

from ...support.gradients import bound


def same_padding(length: int, size: int, stride: int) -> tuple[int, int]:
    total = 0
    while (length + total - size) // stride + 1 < -(-length // stride):
        total += 1
    return total // 2, total - total // 2


def convolved(x, weight, bias, stride, padding):
    """Compute each output separately, from the definition."""
    if padding == "same":
        pads = [same_padding(x.shape[i + 1], weight.shape[i], stride[i]) for i in (0, 1)]
    else:
        pads = [(0, 0) if padding == "valid" else (padding, padding)] * 2
    x = np.pad(x, [(0, 0), *pads, (0, 0)])
    height, width = weight.shape[:2]
    rows = range(0, x.shape[1] - height + 1, stride[0])
    columns = range(0, x.shape[2] - width + 1, stride[1])
    y = np.empty((len(x), len(rows), len(columns), weight.shape[3]))
    for n, (i, row), (j, column) in itertools.product(range(len(x)), enumerate(rows), enumerate(columns)):
        window = x[n, row : row + height, column : column + width]
        y[n, i, j] = np.tensordot(window, weight, 3) + bias
    return y


CONVOLUTIONS = [
    (channels, filters, kernel, stride, padding)
    for channels, filters in ((1, 1), (1, 40), (3, 5))
    for kernel in ((1, 1), (3, 3), (2, 4))
    for stride in ((1, 1), (2, 3))
    for padding in ("same", "valid", 1, 3)
]


@pytest.mark.parametrize(("channels", "filters", "kernel", "stride", "padding"), CONVOLUTIONS)
def test_convolution_is_the_sum_over_each_window(channels, filters, kernel, stride, padding):
    conv = nn.Conv2D(channels, filters, kernel, stride, padding)
    bound(conv, (5, 6, channels))
    rng = np.random.default_rng(0)
    conv.bias[...] = rng.standard_normal(filters)
    x = rng.standard_normal((3, 5, 6, channels))
    y = conv.forward(x, nn.Context())
    np.testing.assert_allclose(y, convolved(x, conv.weight, conv.bias, stride, padding), atol=1e-12)
    assert conv.build(x.shape[1:]) == y.shape[1:]


@pytest.mark.parametrize("padding", ["same", "valid", 2])
@pytest.mark.parametrize("filters", [2, 40], ids=["windows laid out twice", "windows kept"])
@pytest.mark.parametrize("block_bytes", [1, 1500, 7000, 20_000])
def test_the_size_of_a_block_does_not_matter(monkeypatch, block_bytes, filters, padding):
    """The blocks have one row of windows, some rows of an image, or some images; the reference has one block."""
    outcomes = []
    for nbytes in (1 << 30, block_bytes):
        monkeypatch.setattr(Cpu, "block_bytes", nbytes)
        conv = nn.Conv2D(3, filters, 3, padding=padding)
        _, _, grads = bound(conv, (7, 6, 3))
        rng = np.random.default_rng(0)
        y = conv.forward(rng.standard_normal((5, 7, 6, 3)), nn.Context())
        dx = conv.backward(rng.standard_normal(y.shape))
        outcomes.append((y, dx, grads))
    for whole, blocked in zip(*outcomes, strict=True):
        np.testing.assert_allclose(blocked, whole, rtol=1e-12, atol=1e-12)


def pooled(x, size, stride, function):
    rows = range(0, x.shape[1] - size + 1, stride)
    columns = range(0, x.shape[2] - size + 1, stride)
    out = [[function(x[:, i : i + size, j : j + size], axis=(1, 2)) for j in columns] for i in rows]
    return np.array(out).transpose(2, 0, 1, 3)


POOLS = [(1, 1), (1, 2), (2, 2), (2, 1), (2, 3), (3, 3), (3, 1), (3, 2), (4, 5)]


@pytest.mark.parametrize("channels", [1, 3, 33])
@pytest.mark.parametrize(("size", "stride"), POOLS)
@pytest.mark.parametrize(("kind", "function"), [(nn.MaxPool, np.max), (nn.AveragePool, np.mean)])
def test_pooling_is_a_function_of_each_window(kind, function, size, stride, channels):
    pool = kind(size, stride)
    bound(pool, (5, 7, channels))
    x = np.random.default_rng(0).standard_normal((3, 5, 7, channels))
    np.testing.assert_allclose(pool.forward(x, nn.Context()), pooled(x, size, stride, function), rtol=1e-12)


def test_the_stride_of_pooling_is_its_size_unless_given():
    assert nn.MaxPool(3).stride == nn.AveragePool(3).stride == 3


@pytest.mark.parametrize("size", [2, 3, 5])
def test_of_equal_maxima_the_first_gets_the_gradient(size):
    """Every pair of places in the window is tested, with equal values of either sign and with signed zeros."""
    for value, other in ((1.0, 1.0), (-1.0, -1.0), (0.0, -0.0), (-0.0, 0.0)):
        for first, second in itertools.combinations(range(size * size), 2):
            pool = nn.MaxPool(size)
            bound(pool, (size, size, 1))
            x = np.full((1, size * size), -2.0)
            x[0, first], x[0, second] = value, other
            pool.forward(x.reshape(1, size, size, 1), nn.Context())
            dx = pool.backward(np.full((1, 1, 1, 1), 7.0))
            assert np.flatnonzero(dx).tolist() == [first] and dx.sum() == 7


@pytest.mark.parametrize("size", [2, 3])
def test_nan_anywhere_in_a_window_is_its_maximum(size):
    for place in range(size * size):
        pool = nn.MaxPool(size)
        bound(pool, (size, size, 2))
        x = np.full((1, size * size, 2), np.inf)
        x[0, place, 1] = np.nan
        y = pool.forward(x.reshape(1, size, size, 2), nn.Context())
        assert y[0, 0, 0, 0] == np.inf and np.isnan(y[0, 0, 0, 1])
        dx = pool.backward(np.ones((1, 1, 1, 2))).reshape(-1, 2)
        assert np.flatnonzero(dx[:, 1]).tolist() == [place]


@pytest.mark.parametrize("kind", [nn.MaxPool, nn.AveragePool])
def test_what_no_window_covers_gets_no_gradient(kind):
    pool = kind(2, 3)
    bound(pool, (6, 6, 1))
    pool.forward(np.random.default_rng(0).standard_normal((2, 6, 6, 1)), nn.Context())
    for _ in range(2):  # the second pass uses the buffer of the first pass
        dx = pool.backward(np.ones((2, 2, 2, 1)))
        assert not dx[:, 2].any() and not dx[:, :, 5].any() and dx.sum() == pytest.approx(8)


def test_a_layer_that_is_built_again_has_no_values_of_the_previous_images():
    """Images of 8 and 7 pixels, padded to 9, have their borders at different places."""
    rng = np.random.default_rng(0)
    conv, new = (nn.Conv2D(1, 2, 3, stride=2) for _ in range(2))
    bound(conv, (8, 8, 1))
    conv.forward(rng.standard_normal((3, 8, 8, 1)), nn.Context())
    x = rng.standard_normal((3, 7, 7, 1))
    bound(conv, (7, 7, 1))
    bound(new, (7, 7, 1))
    np.testing.assert_array_equal(conv.forward(x, nn.Context()), new.forward(x, nn.Context()))
