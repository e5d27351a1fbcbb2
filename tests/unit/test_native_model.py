"""Several devices of a rank act as one, and one that fails keeps none waiting."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import Job, data, nn, optim
from mpitrain.core.device import Cpu
from mpitrain.core.layout import Array
from mpitrain.data import Split
from mpitrain.models.select import make_model
from mpitrain.nn.layer import Layer

BATCH = 7
SHAPE = (6, 5, 2)


class Counting(Layer):
    """Raises in the forward pass of the example numbered ``bad``."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    def forward(self, x: Array, ctx: nn.Context) -> Array:
        if ctx.position == self.bad:
            raise ArithmeticError("a tower of this layer has failed")
        return x

    def backward(self, dy: Array) -> Array:
        return dy


def split() -> Split:
    rng = np.random.default_rng(0)
    return data.from_arrays(rng.standard_normal((BATCH, *SHAPE)), rng.integers(0, 3, BATCH), classes=3)


def job(*layers: Layer) -> Job:
    return Job(
        model=nn.Sequential(
            *layers,
            nn.Conv2D(2, 4, 3),
            nn.BatchNorm(4, sync=True),
            nn.ReLU(),
            nn.MaxPool(2),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.LayerNorm(24),
            nn.Dense(24, 3),
        ),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.sgd(0.1),
        train=split(),
    )


def gradient(devices: int, *layers: Layer, summing: list[Array] | None = None) -> tuple[float, Array]:
    """Loss and gradient of one batch on so many devices; ``summing`` collects what is summed over workers."""
    made = job(*layers)
    layout = nn.layout_of(made.model, SHAPE, np.float64)
    params, grads = np.zeros(layout.size), np.full(layout.size, np.nan)
    nn.initialize(made.model, layout, params, 1)
    replica = make_model(made, layout, np.float64, [Cpu(i) for i in range(devices)])
    replica.bind(params, grads)
    rng = np.random.default_rng(0)
    examples, labels = rng.standard_normal((BATCH, *SHAPE)), rng.integers(0, 3, BATCH)
    context = nn.Context(training=True, position=20, seed=3, weight=1 / BATCH)
    if summing is not None:
        context.sum_over_workers = lambda array: summing.append(array.copy())
    try:
        for _ in range(2):  # nothing of one batch may stay for the next
            replica.refresh()
            loss = replica.forward(examples, labels, context)
            replica.backward()
        return loss, grads[: layout.n_trained].copy()
    finally:
        replica.close()


@pytest.mark.parametrize("devices", [2, 3, BATCH])
def test_several_devices_are_one(devices: int) -> None:
    """Also those with unequal parts, or one example; Dropout's masks and BatchNorm's statistics are the batch's."""
    loss, grads = gradient(1)
    other_loss, other = gradient(devices)
    assert other_loss == pytest.approx(loss, rel=1e-12)
    gaps = np.isnan(grads)  # between parameters, where nobody writes
    np.testing.assert_allclose(other[~gaps], grads[~gaps], rtol=1e-10, atol=1e-14)
    assert not np.isnan(other).any()


def test_parameters_are_followed() -> None:
    """Those that the replica was bound to last, as they were when it was told to look."""
    made = job()
    layout = nn.layout_of(made.model, SHAPE, np.float64)
    params, others, grads = np.zeros(layout.size), np.zeros(layout.size), np.zeros(layout.size)
    nn.initialize(made.model, layout, params, 1)
    nn.initialize(made.model, layout, others, 2)
    rng = np.random.default_rng(0)
    batch = rng.standard_normal((BATCH, *SHAPE)), rng.integers(0, 3, BATCH)
    replica = make_model(made, layout, np.float64)

    def losses(vector: Array) -> float:
        replica.bind(vector, grads)
        replica.refresh()
        return replica.evaluate(*batch)[0]

    first, second = losses(params), losses(others)
    assert first != second
    params[:] = others
    assert losses(params) == second


def test_several_devices_twice_are_the_same_bits() -> None:
    assert gradient(3)[1].tobytes() == gradient(3)[1].tobytes()


def test_what_is_summed_over_workers_has_been_summed_over_devices() -> None:
    one: list[Array] = []
    three: list[Array] = []
    gradient(1, summing=one)
    gradient(3, summing=three)
    assert len(one) == len(three) == 4  # statistics and their gradient, twice
    for a, b in zip(one, three, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("bad", [20, 22, 24], ids=["the first", "the second", "the last"])
def test_a_device_that_fails_is_told_and_keeps_none_waiting(bad: int) -> None:
    """It fails before BatchNorm, where the others wait for its sums."""
    with pytest.raises(ArithmeticError, match="a tower of this layer"):
        gradient(3, Counting(bad))
