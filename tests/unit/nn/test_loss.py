"""Losses: values by definition, gradients by differences, and invalid outputs and labels."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.errors import JobError

from ...support.gradients import difference

RNG = np.random.default_rng(0)
CASES = [
    (nn.SoftmaxCrossEntropy, (5, 10), RNG.integers(0, 10, 5)),
    (nn.SoftmaxCrossEntropy, (3, 1), np.zeros(3, np.uint8)),
    (nn.SoftmaxCrossEntropy, (1, 33), np.array([32], np.int32)),
    (nn.SigmoidCrossEntropy, (5, 3), RNG.integers(0, 2, (5, 3)).astype(np.float64)),
    (nn.SigmoidCrossEntropy, (7, 1), RNG.integers(0, 2, 7)),
    (nn.SigmoidCrossEntropy, (1,), np.array([1.0])),
    (nn.SigmoidCrossEntropy, (2, 3, 2), RNG.random((2, 3, 2))),
    (nn.MeanSquaredError, (5, 3), RNG.standard_normal((5, 3))),
    (nn.MeanSquaredError, (7, 1), RNG.standard_normal(7)),
    (nn.MeanSquaredError, (2, 3, 2), RNG.integers(0, 256, (2, 3, 2)).astype(np.uint8)),
]


def by_definition(kind, outputs, labels):
    """Return the sum of the losses, by formulas that may overflow."""
    if kind is nn.SoftmaxCrossEntropy:
        shares = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
        return -np.log(shares[np.arange(len(labels)), labels]).sum()
    labels = labels.reshape(outputs.shape).astype(np.float64)
    if kind is nn.MeanSquaredError:
        losses = (outputs - labels) ** 2
    else:
        shares = 1 / (1 + np.exp(-outputs))
        losses = -labels * np.log(shares) - (1 - labels) * np.log(1 - shares)
    return losses.reshape(len(losses), -1).mean(axis=1).sum()


@pytest.mark.parametrize(("kind", "shape", "labels"), CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_loss_is_the_weighted_sum_of_its_definition(kind, shape, labels, dtype):
    outputs = RNG.normal(0, 2, shape).astype(dtype)
    expected = by_definition(kind, outputs.astype(np.float64), labels)
    loss, gradient = kind()(outputs, labels, 0.25)
    assert loss == pytest.approx(expected / 4, rel=1e-5 if dtype == np.float32 else 1e-12)
    assert gradient.dtype == dtype and gradient.shape == shape
    assert kind().evaluate(outputs, labels)[0] == pytest.approx(4 * loss, rel=1e-5)


@pytest.mark.parametrize(("kind", "shape", "labels"), CASES)
def test_the_gradient_is_the_losss_central_difference(kind, shape, labels):
    outputs = RNG.normal(0, 2, shape)
    loss = kind()
    expected = difference(lambda: loss(outputs, labels, 0.25)[0], outputs)
    np.testing.assert_allclose(loss(outputs, labels, 0.25)[1], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "shape", "labels"), CASES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_output_that_is_not_finite_makes_the_loss_nan(kind, shape, labels, value, dtype):
    for place in range(math.prod(shape)):
        outputs = np.zeros(shape, dtype)
        outputs.reshape(-1)[place] = value
        assert math.isnan(kind()(outputs, labels, 1)[0])
        total, correct = kind().evaluate(outputs, labels)
        assert math.isnan(total) and (correct is None or correct < shape[0])


@pytest.mark.parametrize("kind", [nn.SoftmaxCrossEntropy, nn.SigmoidCrossEntropy])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_finite_outputs_do_not_overflow(kind, dtype):
    outputs = np.array([[300.0, -300.0]], dtype) * 10
    labels = np.array([1]) if kind is nn.SoftmaxCrossEntropy else np.array([[0.0, 1.0]])
    loss, gradient = kind()(outputs, labels, 1)
    assert loss == (6000 if kind is nn.SoftmaxCrossEntropy else 3000)
    np.testing.assert_array_equal(gradient, [[1, -1]] if kind is nn.SoftmaxCrossEntropy else [[0.5, -0.5]])


@pytest.mark.parametrize("label", [-1, 10, 2**40, -(2**40)])
def test_a_class_that_there_is_not_makes_the_loss_nan(label):
    outputs = np.zeros((3, 10))
    loss, gradient = nn.SoftmaxCrossEntropy()(outputs, np.array([1, label, 9]), 1)
    assert math.isnan(loss)
    assert np.isnan(gradient[1]).all() and np.isfinite(gradient[[0, 2]]).all()
    total, correct = nn.SoftmaxCrossEntropy().evaluate(outputs, np.array([0, label, 9]))
    assert math.isnan(total) and correct == 1


@pytest.mark.parametrize("label", [-0.5, 1.5, np.nan, 2])
def test_a_label_that_is_no_probability_makes_the_loss_nan(label):
    outputs, labels = np.zeros((2, 2)), np.array([[0, 1], [label, 0]])
    assert math.isnan(nn.SigmoidCrossEntropy()(outputs, labels, 1)[0])
    total, correct = nn.SigmoidCrossEntropy().evaluate(np.array([[-1.0, 1], [1, -1]]), labels)
    assert math.isnan(total) and correct == 1


def test_predictions_are_counted_by_example():
    outputs = np.array([[1.0, 3, 2], [5, 5, 1], [0, 0, 0], [1, 2, 3]])
    assert nn.SoftmaxCrossEntropy().evaluate(outputs, np.array([1, 0, 1, 0]))[1] == 2
    outputs = np.array([[-1.0, 1], [1, 1], [-1, -1], [0, 0]])
    assert nn.SigmoidCrossEntropy().evaluate(outputs, np.array([[0, 1], [0, 1], [0, 0], [0, 0]]))[1] == 3
    assert nn.SigmoidCrossEntropy().evaluate(outputs[:, :1], np.array([0, 1, 1, 1]))[1] == 2
    assert nn.MeanSquaredError().evaluate(outputs, outputs) == (0, None)


@pytest.mark.parametrize(
    ("kind", "outputs", "labels"),
    [
        (nn.SoftmaxCrossEntropy, (4, 3), np.zeros(3, int)),
        (nn.SoftmaxCrossEntropy, (4, 3), np.zeros((4, 1), int)),
        (nn.SoftmaxCrossEntropy, (4, 3), np.zeros(4)),
        (nn.SoftmaxCrossEntropy, (4,), np.zeros(4, int)),
        (nn.SoftmaxCrossEntropy, (4, 2, 3), np.zeros(4, int)),
        (nn.SigmoidCrossEntropy, (4, 2), np.zeros(4)),
        (nn.SigmoidCrossEntropy, (4, 1), np.zeros(5)),
        (nn.MeanSquaredError, (4, 2), np.zeros((2, 4))),
        (nn.MeanSquaredError, (4, 3), np.zeros((4, 1))),
    ],
)
def test_labels_that_do_not_fit_are_refused(kind, outputs, labels):
    for call in (lambda: kind()(np.zeros(outputs), labels, 1), lambda: kind().evaluate(np.zeros(outputs), labels)):
        with pytest.raises(JobError) as error:
            call()
        assert kind.__name__ in str(error.value) and str(labels.shape) in str(error.value)


def test_no_examples_lose_nothing():
    assert nn.SoftmaxCrossEntropy()(np.empty((0, 3)), np.empty(0, int), 1)[0] == 0
    assert nn.MeanSquaredError().evaluate(np.empty((0, 3)), np.empty((0, 3))) == (0, None)
    assert nn.SigmoidCrossEntropy().evaluate(np.empty((0, 1)), np.empty(0)) == (0, 0)
