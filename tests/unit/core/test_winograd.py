"""Winograd's convolutions compared with products of windows, for various sizes, paddings and blocks."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.core import winograd
from mpitrain.core.convolution import Convolution, ConvolutionShape
from mpitrain.core.device import Cpu
from mpitrain.core.winograd import WinogradConvolutions

from ...support.gradients import bound


def passes(conv, x):
    """Return output, gradient of ``x``, and gradients of weight and bias."""
    bound(conv, x.shape[1:], x.dtype)
    y = conv.forward(x, nn.Context())
    dx = conv.backward(np.random.default_rng(1).standard_normal(y.shape).astype(x.dtype))
    return y, dx, conv.weight_grad, conv.bias_grad


@pytest.fixture
def with_windows(monkeypatch):
    """Return a function that computes like ``passes``, with products of windows."""

    def compute(conv, x):
        with monkeypatch.context() as patch:
            patch.setattr(Cpu, "convolutions", None)
            return passes(conv, x)

    return compute


@pytest.fixture
def planned_always(monkeypatch):
    """Plan Winograd's algorithm also where windows are faster."""
    for limit in ("_MIN_TILES", "_MIN_USED"):
        monkeypatch.setattr(winograd, limit, 0)


@pytest.mark.usefixtures("planned_always")
@pytest.mark.parametrize("tiles", [1, 3, 6, 12, 1000], ids=lambda tiles: f"blocks of {tiles} tiles")
@pytest.mark.parametrize("padding", ["same", "valid", 1, 2, 4])
@pytest.mark.parametrize("size", [(3, 3), (4, 5), (6, 6), (7, 4), (9, 3)], ids=str)
def test_results_equal_those_of_windows(monkeypatch, with_windows, size, padding, tiles):
    monkeypatch.setattr(winograd, "BLOCK_BYTES", 0)
    monkeypatch.setattr(winograd, "MIN_BLOCK_TILES", tiles)
    x = np.random.default_rng(0).standard_normal((5, *size, 16))
    expected = with_windows(nn.Conv2D(16, 18, 3, padding=padding), x)
    conv = nn.Conv2D(16, 18, 3, padding=padding)
    results = passes(conv, x)
    assert conv._plan.forward is not None
    for result, correct in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, correct, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("planned_always")
def test_paddings_may_differ_on_all_sides():
    shape = ConvolutionShape((2, 6, 5, 16), (17, 3, 3, 16), (2, 6, 6, 17), (1, 1), ((0, 2), (2, 1)))
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal(shape.images), rng.standard_normal(shape.outputs)
    weight = rng.standard_normal((3, 3, 16, 17))
    padded = nn.Conv2D(16, 17, 3, padding="valid", bias=False)
    whole = np.pad(x, [(0, 0), *shape.padding, (0, 0)])
    bound(padded, whole.shape[1:], x.dtype)
    padded.weight[...] = weight
    plan = WinogradConvolutions().plan(shape, x.dtype, True, lambda tag, size, dtype: np.empty(size, dtype))
    y, dx, grad = np.empty(shape.outputs), np.empty(shape.images), np.empty_like(weight)
    plan.forward(x, weight, y)
    plan.data_gradient(dy, weight, dx)
    plan.filter_gradient(x, dy, grad)
    np.testing.assert_allclose(y, padded.forward(whole, nn.Context()), rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(dx, padded.backward(dy)[:, 0:6, 2:7], rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(grad, padded.weight_grad, rtol=1e-11, atol=1e-11)


def test_float32_is_about_as_accurate_as_products_of_windows(with_windows):
    x = np.random.default_rng(0).standard_normal((30, 14, 14, 32)).astype(np.float32)
    exact = with_windows(nn.Conv2D(32, 64, 3), x.astype(np.float64))
    direct = with_windows(nn.Conv2D(32, 64, 3), x)
    for result, other, correct in zip(passes(nn.Conv2D(32, 64, 3), x), direct, exact, strict=True):
        assert result.dtype == np.float32
        error, usual = (np.sqrt(np.mean((array - correct) ** 2)) for array in (result, other))
        assert error < 3 * usual


@pytest.mark.usefixtures("planned_always")
def test_a_layer_is_used_again(with_windows):
    """With batches and images of other sizes, and as a copy; without the gradient of the images."""
    conv, rng = nn.Conv2D(16, 17, 3), np.random.default_rng(0)
    for shape in ((4, 5, 5, 16), (1, 5, 5, 16), (6, 5, 5, 16), (2, 8, 3, 16)):
        x = rng.standard_normal(shape)
        expected = with_windows(nn.Conv2D(16, 17, 3), x)
        conv.needs_dx = shape[0] != 6
        for layer in (conv, copy.deepcopy(conv)):
            for result, correct in zip(passes(layer, x), expected, strict=True):
                if result is not None:
                    np.testing.assert_allclose(result, correct, rtol=1e-11, atol=1e-11)


def is_planned(
    batch=10, size=(8, 8), channels=16, filters=16, kernel=(3, 3), stride=(1, 1), padding="same", dtype="f4"
):
    conv = nn.Conv2D(channels, filters, kernel, stride, padding)
    bound(conv, (*size, channels), np.dtype(dtype))
    conv.forward(np.zeros((batch, *size, channels), dtype), nn.Context())
    return conv._plan != Convolution()


def test_it_is_used_where_it_is_faster():
    assert is_planned()
    assert is_planned(size=(7, 7), channels=64)
    assert is_planned(dtype="f8")


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": (3, 1)},
        {"kernel": (5, 5)},
        {"stride": (2, 1)},
        {"stride": (1, 2)},
        {"channels": 15},
        {"filters": 15},
        {"batch": 2},
        {"batch": 100, "size": (3, 3)},  # most outputs of its tiles are not used
        {"batch": 100, "size": (4, 4), "padding": "valid"},
    ],
    ids=str,
)
def test_windows_are_used_where_they_are_faster(options):
    assert not is_planned(**options)


def test_images_of_another_type_than_the_weight_are_converted():
    conv = nn.Conv2D(16, 16, 3)
    bound(conv, (8, 8, 16), np.float64)
    x = np.random.default_rng(0).standard_normal((10, 8, 8, 16)).astype(np.float32)
    first, second = (conv.forward(images, nn.Context()).copy() for images in (x, x.astype(np.float64)))
    np.testing.assert_allclose(first, second, rtol=1e-11, atol=1e-11)
