"""Models with 16-bit activations and emulated kernels, compared with the same models in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpitrain import nn
from mpitrain.core.device import Cpu
from mpitrain.core.training_state import TrainingState
from mpitrain.data.batch import Batch
from mpitrain.gpu import ops as launch
from mpitrain.models.layers import LayerModel
from mpitrain.nn.container import input_dtype
from mpitrain.nn.layer import to_device, walk
from mpitrain.plan.config import RunConfig

from ...support.gradients import bound
from ...support.kernel_device import Device

NARROW = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Branches(nn.Layer):
    """A user-defined container; its own code may use the input, so the type of its first layer does not apply."""

    supports_amp = True

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(4, 4)

    def children(self) -> list[tuple[str, nn.Layer]]:
        return [("dense", self.dense)]


class Mixed(Cpu):
    """A device that computes like a GPU, with the emulated kernels."""

    is_gpu = True
    ops = launch
    multiplies_bias = False

    def __init__(self, name: str) -> None:
        super().__init__()
        self.compute_dtype = np.dtype(NARROW[name])

    def matmul(self, a: np.ndarray, b: np.ndarray, *, out: np.ndarray) -> np.ndarray:
        assert a.dtype == b.dtype
        if a.dtype != self.compute_dtype:
            return super().matmul(a, b, out=out)
        out[...] = a.astype(np.float32) @ b.astype(np.float32)
        return out


class Halved(nn.Layer):
    """A user-defined layer without support for 16-bit activations."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[str] = set()

    def forward(self, x: np.ndarray, ctx: nn.Context) -> np.ndarray:
        self.dtypes.add(x.dtype.name)
        return 0.5 * x

    def backward(self, dy: np.ndarray) -> np.ndarray:
        self.dtypes.add(dy.dtype.name)
        return 0.5 * dy


class Doubled(nn.Tanh):
    """A user-defined layer without support for 16-bit activations, derived from a layer with support."""

    def forward(self, x: np.ndarray, ctx: nn.Context) -> np.ndarray:
        return 2 * super().forward(x, ctx)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return super().backward(2 * dy)


class Inside(nn.Sequential):
    """A user-defined container."""

    def forward(self, x: np.ndarray, ctx: nn.Context) -> np.ndarray:
        return 0.5 * super().forward(x, ctx)

    def backward(self, dy: np.ndarray) -> np.ndarray | None:
        return super().backward(0.5 * dy)


def images() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2D(2, 4, 3), nn.BatchNorm(4), nn.ReLU(), nn.MaxPool(2), nn.Residual(nn.Conv2D(4, 4, 3), nn.GELU())),
        *(nn.AveragePool(2, 1), nn.Conv2D(4, 8, 2, bias=False), nn.LeakyReLU(), nn.Flatten(), nn.Dropout(0.3)),
        *(nn.Dense(72, 16), nn.LayerNorm(16), nn.Tanh(), nn.Reshape(16), nn.Dense(16, 6), nn.Sigmoid(), nn.Dense(6, 6)),
    )


def own() -> nn.Sequential:
    return nn.Sequential(
        *(Halved(), nn.Flatten(), nn.Dense(144, 10), Halved(), nn.ReLU(), Inside(nn.Dense(10, 8), nn.ReLU())),
        *(Doubled(), nn.Dense(8, 6), Halved()),
    )


def words() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(3000, 8), nn.LayerNorm(8), nn.Flatten(), nn.Dense(5 * 8, 6))


def step(model: nn.Sequential, place_it: Callable[[nn.Layer], None], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs and the gradients of parameters."""
    _, _, grads = bound(model, x.shape[1:], dtype=np.float32)
    place_it(model)
    position: Any = np.array([70], np.uint64) if model.device.is_gpu else 70
    outputs = model.forward(x.copy(), nn.Context(training=True, position=position, seed=3, weight=0.25))
    criterion = nn.SoftmaxCrossEntropy()
    _, gradient = criterion(outputs, np.array([0, 5, 3, 3]), 0.25)
    model.backward(gradient)
    grads[np.isnan(grads)] = 0  # gaps
    return outputs, grads


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (images, "bfloat16"),
        (own, "float32"),
        (words, "float32"),
        (lambda: nn.Sequential(nn.Flatten()), "float32"),
        (lambda: nn.Sequential(Branches()), "float32"),
    ],
)
def test_examples_get_the_type_of_the_first_layer(make: Callable[[], nn.Sequential], expected: str) -> None:
    """The first layer may need indices as examples, and 16-bit types cannot represent all indices."""
    model = make()
    to_device(model, Mixed("bfloat16"))
    assert input_dtype(model) == expected


@pytest.mark.parametrize("make", [images, own, words])
@pytest.mark.parametrize(("name", "tolerance"), [("float16", 1e-2), ("bfloat16", 8e-2)])
def test_a_step_comes_close_to_that_in_float32(
    device: Device, make: Callable[[], nn.Sequential], name: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3000, (4, 5)) if make is words else rng.standard_normal((4, 9, 8, 2))
    x = x.astype(np.float32)
    expected, gradients = step(make(), lambda model: None, x)
    expected, gradients = expected.copy(), gradients.copy()
    launch.use(device.places[0])
    mixed = Mixed(name)
    monkeypatch.setattr(nn.Loss, "device", mixed)
    outputs, found = step(make(), lambda model: to_device(model, mixed), x)
    outputs = outputs.astype(np.float32)
    assert found.dtype == np.float32
    for one, two in ((outputs, expected), (found, gradients)):
        assert np.linalg.norm(one - two) < tolerance * np.linalg.norm(two)
    assert (outputs != expected).any(), "nothing was rounded"


def test_activations_have_16_bits_but_where_a_user_made_the_layer(device: Device) -> None:
    launch.use(device.places[0])
    mixed, model = Mixed("bfloat16"), own()
    bound(model, (9, 8, 2), dtype=np.float32)
    to_device(model, mixed)
    x = np.random.default_rng(0).standard_normal((4, 9, 8, 2)).astype(np.float32)
    gradient = np.ones_like(model.forward(x, nn.Context()))
    model.backward(gradient)
    wide = {path for path, layer in walk(model) if layer.compute_dtype is None}
    assert wide == {"halved1", "halved2", "inside1", "inside1.dense1", "inside1.relu1", "doubled1", "halved3"}
    assert all(layer.dtypes == {"float32"} for _, layer in walk(model) if isinstance(layer, Halved))


class Own(nn.SoftmaxCrossEntropy):
    """A user-defined loss without support for 16-bit outputs and loss scales."""

    def __call__(self, outputs: np.ndarray, labels: np.ndarray, weight: float) -> tuple[float, np.ndarray]:
        assert outputs.dtype == np.float32
        share = np.exp(outputs - outputs.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        picked = np.arange(len(labels)), labels
        total = -weight * float(np.log(share[picked]).sum())
        share[picked] -= 1
        return total, weight * share


def test_a_loss_of_a_users_own_is_given_float32_and_its_gradient_is_scaled(device: Device) -> None:
    launch.use(device.places[0])
    x, labels = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32), np.array([0, 5, 3, 3])
    gradients = []
    for criterion in (nn.SoftmaxCrossEntropy(), Own()):
        model = nn.Sequential(nn.Dense(5, 6))
        layout, params, grads = bound(model, (5,), dtype=np.float32)
        plan = SimpleNamespace(layout=layout, config=RunConfig(), weight=0.25, layer_starts=[0])
        state = TrainingState(layout)
        state.loss_scale = np.array([1024.0])
        single = LayerModel(model, criterion, plan, Mixed("float16"), state)
        single.bind(params, grads)
        loss = single.compute_loss(Batch(x, labels, 0))
        single.compute_grads(lambda start: None)
        assert np.isfinite(loss)
        gradients.append(grads[np.isfinite(grads)])
    np.testing.assert_allclose(*gradients, rtol=1e-2, atol=1e-2 * np.abs(gradients[0]).max())
