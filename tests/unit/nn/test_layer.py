"""Properties of every layer: gradients, precisions, NaN, strides, and the arrays that a layer may overwrite."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.errors import JobError

from ...support.gradients import bound, check_gradients

LAYERS = [
    (nn.Dense(1, 1), (1,)),
    (nn.Dense(5, 3), (5,)),
    (nn.Dense(3, 7, bias=False), (3,)),
    (nn.ReLU(), (7,)),
    (nn.ReLU(), (2, 3, 1)),
    (nn.LeakyReLU(), (7,)),
    (nn.LeakyReLU(0.5), (2, 3)),
    (nn.GELU(), (2, 5)),
    (nn.Tanh(), (7,)),
    (nn.Sigmoid(), (1, 3)),
    (nn.Flatten(), (2, 3, 2)),
    (nn.Flatten(), ()),
    (nn.Reshape(3, 2, 1), (6,)),
    (nn.Conv2D(1, 1, 1), (1, 1, 1)),
    (nn.Conv2D(2, 3, 3), (5, 4, 2)),
    (nn.Conv2D(1, 12, 3), (4, 5, 1)),
    (nn.Conv2D(2, 2, 2), (3, 4, 2)),
    (nn.Conv2D(1, 3, 3, stride=2), (5, 6, 1)),
    (nn.Conv2D(2, 3, (1, 3), stride=(3, 1), padding="valid"), (7, 5, 2)),
    (nn.Conv2D(3, 2, 2, stride=3, padding=1, bias=False), (4, 7, 3)),
    (nn.Conv2D(1, 2, 5, padding=2), (3, 3, 1)),
    (nn.MaxPool(2), (4, 6, 3)),
    (nn.MaxPool(2), (5, 3, 1)),
    (nn.MaxPool(2, 1), (4, 3, 2)),
    (nn.MaxPool(3), (7, 6, 2)),
    (nn.MaxPool(3, 2), (5, 7, 1)),
    (nn.MaxPool(1, 2), (3, 4, 2)),
    (nn.AveragePool(2), (5, 4, 3)),
    (nn.AveragePool(3, 1), (3, 4, 2)),
    (nn.BatchNorm(3), (3,)),
    (nn.BatchNorm(2), (3, 2, 2)),
    (nn.LayerNorm(5), (5,)),
    (nn.LayerNorm(3), (2, 3)),
    (nn.Dropout(0.4), (6,)),
    (nn.Dropout(0), (3,)),
    (nn.Sequential(nn.Dense(3, 4), nn.ReLU(), nn.Dense(4, 2), nn.Tanh()), (3,)),
    (nn.Sequential(nn.Conv2D(1, 2, 3), nn.ReLU(), nn.MaxPool(2), nn.Flatten(), nn.Dense(8, 3)), (5, 4, 1)),
    (nn.Sequential(nn.Sequential(nn.Tanh(), nn.Dense(3, 2)), nn.ReLU()), (3,)),
    (nn.Residual(nn.Dense(3, 5), nn.ReLU(), nn.Dense(5, 3), nn.ReLU()), (3,)),
    (nn.Residual(nn.ReLU()), (4,)),
    (nn.Residual(nn.Residual(nn.Tanh()), nn.LeakyReLU()), (4,)),
]


def described(case: object) -> str:
    return "x".join(map(str, case)) if isinstance(case, tuple) else type(case).__name__


def fresh(layer: nn.Layer) -> nn.Layer:
    return copy.deepcopy(layer)


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=described)
def test_gradients_are_central_differences(layer, shape):
    check_gradients(fresh(layer), shape)
    check_gradients(fresh(layer), shape, batch=1 if not isinstance(layer, nn.BatchNorm) else 2)


@pytest.mark.parametrize("layer", [nn.BatchNorm(3), nn.Dropout(0.4)], ids=described)
def test_gradients_of_validation_are_central_differences(layer):
    check_gradients(fresh(layer), (3,), ctx=nn.Context())


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=described)
def test_single_precision_agrees_with_double(layer, shape):
    results = []
    for dtype in (np.float64, np.float32):
        again = fresh(layer)
        again.needs_dx = True
        _, _, grads = bound(again, shape, dtype)
        rng = np.random.default_rng(3)
        x = rng.standard_normal((5, *shape)).astype(dtype)
        y = again.forward(x, nn.Context(training=True, weight=0.2))
        dy = rng.standard_normal(y.shape).astype(dtype)
        dx = again.backward(dy)
        assert y.dtype == dx.dtype == dtype and y.shape == dy.shape and dx.shape == x.shape
        results.append((y, dx, grads))
    for double, single in zip(*results, strict=True):
        np.testing.assert_allclose(single, double, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=described)
def test_nan_passes_through(layer, shape):
    """NaN in one example reaches all its outputs (some, after Dropout), and no other example except in BatchNorm."""
    again = fresh(layer)
    again.needs_dx = True
    bound(again, shape)
    x = np.ones((2, *shape))
    x[1] = np.nan
    y = again.forward(x, nn.Context(training=True, position=3))
    reached = np.isnan(y[1])
    assert reached.any() if isinstance(layer, nn.Dropout) else reached.all()
    if not isinstance(layer, nn.BatchNorm):
        assert not np.isnan(y[0]).any()


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=described)
def test_strides_do_not_matter_and_x_is_left_alone(layer, shape):
    contiguous, strided = fresh(layer), fresh(layer)
    outcomes = []
    for again in (contiguous, strided):
        again.needs_dx = True
        _, _, grads = bound(again, shape)
        rng = np.random.default_rng(5)
        x = rng.standard_normal((4, *shape))
        before = x.copy()
        y = again.forward(x if again is contiguous else backwards(x), nn.Context(training=True))
        dy = rng.standard_normal(y.shape)
        dx = again.backward(dy if again is contiguous else backwards(dy))
        np.testing.assert_array_equal(x, before)
        outcomes.append((y, dx, grads))
    for first, second in zip(*outcomes, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-12, atol=1e-14)


def backwards(array: np.ndarray) -> np.ndarray:
    """Return the same values in Fortran order, with gaps."""
    gapped = np.empty((*array.shape[::-1], 2)).T[0]
    gapped[...] = array
    return gapped


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=described)
def test_an_unneeded_input_gradient_changes_no_other(layer, shape):
    needed, unneeded = fresh(layer), fresh(layer)
    grads = []
    for again, needs_dx in ((needed, True), (unneeded, False)):
        again.needs_dx = needs_dx
        grads.append(bound(again, shape)[2])
        x = np.random.default_rng(7).standard_normal((3, *shape))
        y = again.forward(x, nn.Context(training=True))
        dx = again.backward(np.random.default_rng(8).standard_normal(y.shape))
        assert needs_dx or not again.declared or dx is None
    np.testing.assert_array_equal(*grads)


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=described)
def test_a_smaller_last_batch_works(layer, shape):
    again = fresh(layer)
    bound(again, shape)
    x = np.random.default_rng(9).standard_normal((5, *shape))
    for batch in (5, 2, 5):
        y = again.forward(x[:batch], nn.Context()).copy()
        np.testing.assert_allclose(y[:2], again.forward(x[:2], nn.Context()), rtol=1e-12, atol=1e-14)
        assert len(y) == batch


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Dense(0, 3), "in_features is 0"),
        (lambda: nn.Dense(3, 2.5), "out_features is 2.5"),
        (lambda: nn.Dense(True, 3), "in_features is True"),
        (lambda: nn.Embedding("words", 3), "vocabulary is 'words'"),
        (lambda: nn.Conv2D(1, 2, 0), "kernel is 0"),
        (lambda: nn.Conv2D(1, 2, (3, 3, 3)), "kernel is (3, 3, 3)"),
        (lambda: nn.Conv2D(1, 2, 3, stride=(1, -1)), "stride is -1"),
        (lambda: nn.Conv2D(1, 2, 3, padding="full"), "padding is 'full'"),
        (lambda: nn.Conv2D(1, 2, 3, padding=-1), "padding is -1"),
        (lambda: nn.MaxPool(0), "size is 0"),
        (lambda: nn.MaxPool(17), "size is 17"),
        (lambda: nn.AveragePool(2, stride=0), "stride is 0"),
        (lambda: nn.Dropout(1), "rate is 1"),
        (lambda: nn.Dropout(math.nan), "rate is nan"),
        (lambda: nn.LeakyReLU(-0.1), "slope is -0.1"),
        (lambda: nn.BatchNorm(3, momentum=1.5), "momentum is 1.5"),
        (lambda: nn.LayerNorm(3, eps=-1), "eps is -1"),
        (lambda: nn.Reshape(3, -1), "shape is -1"),
    ],
)
def test_arguments_are_checked(make, words):
    with pytest.raises(JobError) as error:
        make()
    assert f"{words}, must be " in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("layer", "shape", "words"),
    [
        (nn.Dense(784, 10), (28, 28, 1), ["(784,)", "(28, 28, 1)", "Flatten()"]),
        (nn.Dense(784, 10), (100,), ["(784,)", "(100,)", "in_features=100"]),
        (nn.Dense(784, 10), (), ["(784,)", "()"]),
        (nn.Conv2D(1, 8, 3), (784,), ["(height, width, 1)", "(784,)", "Reshape"]),
        (nn.Conv2D(1, 8, 3), (28, 28, 3), ["(28, 28, 3)", "in_channels=3"]),
        (nn.Conv2D(1, 8, 5, padding="valid"), (4, 9, 1), ["(5, 5)", "(4, 9)"]),
        (nn.MaxPool(2), (784,), ["(height, width, channels)", "(784,)"]),
        (nn.MaxPool(3), (2, 5, 1), ["size is 3", "(2, 5)"]),
        (nn.BatchNorm(3), (3, 4), ["(..., 3)", "(3, 4)", "features=4"]),
        (nn.LayerNorm(3), (), ["(..., 3)", "()"]),
        (nn.Reshape(2, 3), (7,), ["(7,)", "(2, 3)", "6"]),
    ],
    ids=described,
)
def test_a_shape_that_a_layer_cannot_take_is_named_with_what_it_can(layer, shape, words):
    with pytest.raises(JobError) as error:
        nn.layout_of(fresh(layer), shape, np.float32)
    assert all(word in str(error.value) for word in [type(layer).__name__, *words])


def test_gelu_keeps_its_left_tail():
    gelu = nn.GELU()
    bound(gelu, (1,))
    y = gelu.forward(np.array([[-10.0], [-5.0], [0.0], [5.0]]), nn.Context())
    np.testing.assert_allclose(y[:, 0], [-7.619853024160527e-23, -1.4332578594969193e-06, 0, 4.999998566742141])


def test_sigmoid_is_accurate_in_both_tails():
    sigmoid = nn.Sigmoid()
    bound(sigmoid, (1,))
    x = np.array([[-800.0], [-40.0], [0.0], [40.0], [800.0]])
    y = sigmoid.forward(x, nn.Context())
    np.testing.assert_allclose(y[:, 0], [0, math.exp(-40), 0.5, 1, 1], rtol=1e-15)


def test_an_embedding_looks_rows_up_and_adds_gradients_in_order():
    embedding = nn.Embedding(5, 3)
    _, _, grads = bound(embedding, (4,), np.float32)
    tokens = np.array([[0, 4, 4, 1], [4, 0, 0, 4]])
    y = embedding.forward(tokens, nn.Context())
    np.testing.assert_array_equal(y, embedding.weight[tokens])
    dy = np.random.default_rng(0).standard_normal(y.shape).astype(np.float32)
    assert embedding.backward(dy) is None
    expected = np.zeros((5, 3), np.float32)
    np.add.at(expected, tokens, dy)
    np.testing.assert_array_equal(embedding.weight_grad, expected)
    assert np.isnan(grads[15:]).all()


@pytest.mark.parametrize("tokens", [[-1, 5, 2], [np.nan, np.inf, 2.0], [-np.inf, 1e300, 2.0]])
def test_an_embedding_of_what_is_no_row_is_nan_and_gets_no_gradient(tokens):
    embedding = nn.Embedding(5, 3)
    bound(embedding, ())
    y = embedding.forward(np.array(tokens), nn.Context())
    np.testing.assert_array_equal(np.isnan(y), [[True] * 3, [True] * 3, [False] * 3])
    embedding.backward(np.ones((3, 3)))
    np.testing.assert_array_equal(embedding.weight_grad, np.eye(5)[[2, 2, 2]].T)


def test_an_embedding_cannot_follow_parameters():
    with pytest.raises(JobError, match="embedding1: "):
        nn.layout_of(nn.Sequential(nn.Dense(2, 2), nn.Embedding(3, 4)), (2,), np.float32)
