"""Winograd's convolutions compared with products of windows, for various sizes, paddings and blocks."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.core import winograd
from mpitrain.core.convolution import Convolution, ConvolutionShape
from mpitrain.core.device import Cpu
from mpitrain.core.winograd import WinogradConvolutions

from ...support.gradients import bound


def passes(conv, x):
    """Return output, gradient of ``x``, and gradients of the parameters."""
    _, _, grads = bound(conv, x.shape[1:], x.dtype)
    y = conv.forward(x, nn.Context())
    dx = conv.backward(np.random.default_rng(1).standard_normal(y.shape).astype(x.dtype))
    return y, dx, grads


@pytest.fixture
def with_windows(monkeypatch):
    """Return a function that computes like ``passes``, with products of windows."""

    def compute(conv, x):
        with monkeypatch.context() as patch:
            patch.setattr(Cpu, "convolutions", None)
            return passes(conv, x)

    return compute


@pytest.fixture
def tiles_per_block(monkeypatch):
    def limit(tiles):
        monkeypatch.setattr(winograd, "_BLOCK_BYTES", 0)
        monkeypatch.setattr(winograd, "_MIN_BLOCK_TILES", tiles)

    return limit


@pytest.mark.parametrize("blocks", [1, 3, 6, 12, 1000], ids=lambda tiles: f"blocks of {tiles} tiles")
@pytest.mark.parametrize("padding", ["same", "valid", 1, 2, 4])
@pytest.mark.parametrize("size", [(3, 3), (4, 5), (6, 6), (7, 4), (9, 3)], ids=str)
def test_results_equal_those_of_windows(with_windows, tiles_per_block, size, padding, blocks):
    tiles_per_block(blocks)
    x = np.random.default_rng(0).standard_normal((5, *size, 16))
    expected = with_windows(nn.Conv2D(16, 18, 3, padding=padding), x)
    conv = nn.Conv2D(16, 18, 3, padding=padding)
    results = passes(conv, x)
    assert conv._plan.forward is not None
    for result, correct in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, correct, rtol=1e-11, atol=1e-11)


def test_paddings_may_differ_on_all_sides():
    shape = ConvolutionShape((2, 6, 5, 16), (17, 3, 3, 16), (2, 6, 6, 17), (1, 1), ((0, 2), (2, 1)))
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal(shape.images), rng.standard_normal(shape.outputs)
    weight = rng.standard_normal((3, 3, 16, 17))
    padded = nn.Conv2D(16, 17, 3, padding="valid", bias=False)
    whole = np.pad(x, [(0, 0), *shape.padding, (0, 0)])
    bound(padded, whole.shape[1:], x.dtype)
    padded.weight[...] = weight
    plan = WinogradConvolutions().plan(shape, x.dtype, True)
    y, dx, grad = np.empty(shape.outputs), np.empty(shape.images), np.empty_like(weight)
    plan.forward(x, weight, y)
    plan.data_gradient(dy, weight, dx)
    plan.filter_gradient(x, dy, grad)
    np.testing.assert_allclose(y, padded.forward(whole, nn.Context()), rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(dx, padded.backward(dy)[:, 0:6, 2:7], rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(grad, padded.weight_grad, rtol=1e-11, atol=1e-11)


def test_float32_is_about_as_accurate_as_products_of_windows(with_windows):
    x = np.random.default_rng(0).standard_normal((8, 14, 14, 32)).astype(np.float32)
    exact = with_windows(nn.Conv2D(32, 64, 3), x.astype(np.float64))
    for result, direct, correct in zip(
        passes(nn.Conv2D(32, 64, 3), x), with_windows(nn.Conv2D(32, 64, 3), x), exact, strict=True
    ):
        assert result.dtype == np.float32
        errors = [np.sqrt(np.mean((array - correct) ** 2)) for array in (result, direct)]
        assert errors[0] < 3 * errors[1]


def test_batches_of_other_sizes(with_windows):
    conv = nn.Conv2D(16, 16, 3)
    bound(conv, (5, 5, 16))
    rng = np.random.default_rng(0)
    for images in (4, 1, 6, 4):
        x = rng.standard_normal((images, 5, 5, 16))
        y = conv.forward(x, nn.Context())
        reference = nn.Conv2D(16, 16, 3)
        np.testing.assert_allclose(y, with_windows(reference, x)[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("kernel", "stride", "channels", "dtype"),
    [((3, 3), (2, 1), 16, "f4"), ((3, 1), (1, 1), 16, "f4"), ((3, 3), (1, 1), 15, "f4"), ((3, 3), (1, 1), 16, "f2")],
)
def test_other_convolutions_use_windows(kernel, stride, channels, dtype):
    shape = ConvolutionShape((1, 8, 8, channels), (16, *kernel, channels), (1, 6, 6, 16), stride, ((0, 0), (0, 0)))
    assert WinogradConvolutions().plan(shape, np.dtype(dtype), True) == Convolution()
