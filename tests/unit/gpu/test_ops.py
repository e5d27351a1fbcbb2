"""Layers, losses and batches with emulated GPU kernels in place of Numba's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.core.device import Cpu
from mpitrain.data import InMemory, loader
from mpitrain.gpu import ops as launch
from mpitrain.nn.activation import Activation

from ...support.gradients import bound
from ...support.kernel_device import Device

Compare = Callable[[Callable[[], list[np.ndarray]]], None]


@pytest.fixture
def same(device: Device, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """A function that compares the arrays that another returns with Numba's kernels and with emulated kernels."""

    def compare(function: Callable[[], list[np.ndarray]]) -> None:
        expected = [np.array(array) for array in function()]
        launch.use(device.places[0])
        with monkeypatch.context() as patch:
            patch.setattr(loader, "ops", launch)
            patch.setattr(Cpu, "ops", launch)
            patch.setattr(Cpu, "is_gpu", True)
            patch.setattr(Cpu, "multiplies_bias", False)
            found = function()
        for one, two in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-12)

    return compare


def steps(layers: list[nn.Layer], criterion: nn.Loss, x: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """Return the outputs, loss and gradients of a step, and the results of validation."""
    model = nn.Sequential(*layers)
    _, _, grads = bound(model, x.shape[1:])
    position: Any = np.array([70], np.uint64) if model.device.is_gpu else 70
    outputs = model.forward(x.copy(), nn.Context(training=True, position=position, seed=3, weight=0.25))
    total, slope = criterion(outputs, labels, 0.25)
    seen = [outputs.copy(), np.array(total)]
    model.backward(slope)
    outputs = model.forward(x.copy(), nn.Context())
    evaluated = criterion.evaluate(outputs, labels)
    return [*seen, np.nan_to_num(grads), outputs, np.array([part for part in np.ravel(evaluated) if part is not None])]


def test_a_model_of_images(same: Compare) -> None:
    x = np.random.default_rng(0).standard_normal((4, 9, 8, 2))

    def run() -> list[np.ndarray]:
        layers = [
            *(nn.Conv2D(2, 4, 3), nn.BatchNorm(4), nn.ReLU(), nn.MaxPool(2)),
            *(nn.Conv2D(4, 5, (2, 3), 1, 1), nn.LeakyReLU(), nn.MaxPool(3, 1), nn.GELU()),
            *(nn.Conv2D(5, 3, 1, padding="valid"), nn.Tanh(), nn.Flatten()),
            *(nn.Dropout(0.3), nn.Dense(18, 6), nn.LayerNorm(6), nn.Sigmoid()),
        ]
        return steps(layers, nn.SoftmaxCrossEntropy(), x, np.array([0, 5, 3, 3]))

    same(run)


def test_batch_norm_of_a_mean_far_above_the_deviation(same: Compare) -> None:
    x = 1e8 + np.random.default_rng(0).standard_normal((100, 3))
    same(lambda: steps([nn.BatchNorm(3), nn.Dense(3, 2)], nn.MeanSquaredError(), x, np.ones((100, 2))))


@pytest.mark.parametrize(
    ("criterion", "labels"),
    [(nn.SigmoidCrossEntropy(), np.array([0, 1, 1, 0, 1, 0])), (nn.MeanSquaredError(), np.arange(6.0))],
)
def test_a_model_of_words(same: Compare, criterion: nn.Loss, labels: np.ndarray) -> None:
    x = np.random.default_rng(0).integers(0, 11, (6, 5)).astype(float)

    def run() -> list[np.ndarray]:
        layers = [nn.Embedding(11, 7), nn.LayerNorm(7), nn.Dropout(0.5), nn.Flatten(), nn.Dense(35, 1)]
        return steps(layers, criterion, x, labels)

    same(run)


@pytest.mark.parametrize("criterion", [nn.SoftmaxCrossEntropy(), nn.SigmoidCrossEntropy(), nn.MeanSquaredError()])
def test_a_loss_scales_its_gradient(device: Device, criterion: nn.Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = np.random.default_rng(0).standard_normal((6, 3))
    labels = np.arange(6) % 3 if isinstance(criterion, nn.SoftmaxCrossEntropy) else np.ones((6, 3))
    loss_of_one, gradient = criterion(outputs, labels, 0.5)
    expected = 1024 * gradient
    launch.use(device.places[0])
    monkeypatch.setattr(Cpu, "ops", launch)
    monkeypatch.setattr(criterion, "scale", np.array([1024.0]))
    found, gradient = criterion(outputs, labels, 0.5)
    np.testing.assert_allclose(found, loss_of_one, rtol=1e-12)
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)


@pytest.mark.parametrize("activation", [nn.ReLU, lambda: nn.LeakyReLU(0.2), nn.GELU, nn.Tanh, nn.Sigmoid])
def test_an_activation_is_done_with_the_bias_before_it(
    same: Compare, activation: Callable[[], Activation], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    plain = launch.add_bias

    def spy(product: np.ndarray, bias: np.ndarray, kind: str, *others: Any) -> Any:
        done.append(kind)
        return plain(product, bias, kind, *others)

    monkeypatch.setattr(launch, "add_bias", spy)
    x = np.random.default_rng(0).standard_normal((4, 5, 6, 2))

    def run() -> list[np.ndarray]:
        layers = [
            *(nn.Conv2D(2, 3, 3), activation(), nn.Conv2D(3, 5, 2, bias=False), activation(), nn.Flatten()),
            *(nn.Dense(150, 7), activation(), activation(), nn.Dense(7, 5, bias=False), activation(), nn.Dense(5, 4)),
        ]
        return steps(layers, nn.SoftmaxCrossEntropy(), x, np.array([0, 1, 3, 3]))

    same(run)
    kind = activation().kind
    assert done == [kind, kind, "none"] * 2


def test_an_activation_of_a_users_own_is_left_alone(same: Compare) -> None:
    class Doubled(nn.Tanh):
        def forward(self, x: np.ndarray, ctx: nn.Context) -> np.ndarray:
            return 2 * super().forward(x, ctx)

        def backward(self, dy: np.ndarray) -> np.ndarray:
            return super().backward(2 * dy)

    x = np.random.default_rng(0).standard_normal((4, 5))
    same(lambda: steps([nn.Dense(5, 3), Doubled()], nn.MeanSquaredError(), x, np.ones((4, 3))))


def test_average_pooling(same: Compare) -> None:
    x = np.random.default_rng(0).standard_normal((3, 6, 6, 2))

    def run() -> list[np.ndarray]:
        layers = [nn.Conv2D(2, 3, 3), nn.AveragePool(3, 2), nn.Flatten()]
        return steps(layers, nn.MeanSquaredError(), x, np.ones((3, 12)))

    same(run)


def test_batches(same: Compare) -> None:
    rng = np.random.default_rng(0)
    resident = InMemory(rng.integers(0, 256, (20, 4, 3)).astype(np.uint8), np.arange(20))

    def run() -> list[np.ndarray]:
        examples, labels = np.zeros((6, 4, 3), np.float32), np.zeros(6, np.int64)
        resident.take(np.array([3, 19, 0, 3, 7, 8]), 1 / 255, examples, labels)
        return [examples, labels]

    same(run)
