"""Models on one or several devices: equal gradients, with and without accumulation, and errors of one device."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import Job, data, nn, optim
from mpitrain.core.device import Cpu
from mpitrain.core.layout import Array
from mpitrain.core.training_state import TrainingState
from mpitrain.data import Split
from mpitrain.data.batch import Batch
from mpitrain.errors import JobError
from mpitrain.models.accumulation import GradientAccumulation
from mpitrain.models.select import make_model
from mpitrain.nn.layer import Layer
from mpitrain.plan.config import RunConfig
from mpitrain.plan.plan import Plan, make_plan

BATCH = 7
SHAPE = (6, 5, 2)


class Counting(Layer):
    """Raises in the forward pass of the part of a batch that begins with the position ``bad``."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    def forward(self, x: Array, ctx: nn.Context) -> Array:
        if ctx.position == self.bad:
            raise ArithmeticError("a replica of this layer has failed")
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


def plan_of(job: Job) -> Plan:
    config = RunConfig.of(batch_size=BATCH, train_steps=1, seed=3, dtype="float64", bucket_bytes=0)
    return make_plan(job, config, 1)


def batch() -> Batch:
    rng = np.random.default_rng(0)
    return Batch(rng.standard_normal((BATCH, *SHAPE)), rng.integers(0, 3, BATCH), position=20)


def gradient(
    devices: int, *layers: Layer, summing: list[Array] | None = None, ready: list[int] | None = None
) -> tuple[float, Array]:
    """Return the loss and the gradient of a batch.

    Args:
        devices: The number of devices.
        layers: The first layers of the model.
        summing: Receives the arrays that would be summed over workers.
        ready: Receives the announced starts of gradients that are ready.
    """
    made = job(*layers)
    plan = plan_of(made)
    params, grads = np.zeros(plan.layout.size), np.full(plan.layout.size, np.nan)
    nn.initialize(made.model, plan.layout, params, 1)
    sum_over_workers = None if summing is None else lambda array: summing.append(array.copy())
    model = make_model(made, plan, [Cpu(i) for i in range(devices)], TrainingState(plan.layout), sum_over_workers)
    model.bind(params, grads)
    accumulation = GradientAccumulation(model, [grads])
    announced: list[int] = []
    try:
        for _ in range(2):  # the first batch must not affect the results of the second
            announced.clear()
            loss = float(accumulation.forward(batch(), [BATCH]))
            accumulation.backward(announced.append)
        if ready is not None:
            ready += announced
        return loss, grads[: plan.layout.n_trained].copy()
    finally:
        model.close()


def test_gradients_are_announced_from_the_last_layer_to_the_first() -> None:
    ready: list[int] = []
    gradient(1, ready=ready)
    starts = {start for start in plan_of(job()).layer_starts if start > 0}
    assert ready == [*sorted(starts, reverse=True)[-len(ready) + 1 :], 0]
    assert len(ready) > 3


class Pair(Layer):
    """A user-defined container: two layers, one after the other."""

    announces_children = True

    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.layers = layers

    def children(self) -> list[tuple[str, Layer]]:
        return [(f"layer{i}", layer) for i, layer in enumerate(self.layers)]

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        for layer in self.layers:
            shape = layer.build(shape)
        return shape

    def forward(self, x: Array, ctx: nn.Context) -> Array:
        for layer in self.layers:
            x = layer.forward(x, ctx)
        return x

    def backward(self, dy: Array) -> Array:
        for index, layer in reversed([*enumerate(self.layers)]):
            dy = layer.backward(dy)
            if self.after_backward is not None:
                self.after_backward(index)
        return dy


class Silent(Pair):
    """A container like ``Pair`` that does not announce its children."""

    announces_children = False


@pytest.mark.parametrize("container", [Pair, Silent])
def test_a_container_states_whether_it_announces_its_children(container: type[Pair]) -> None:
    made = Job(
        model=container(nn.Sequential(nn.Flatten(), nn.Dense(60, 5)), nn.Dense(5, 3)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.sgd(0.1),
        train=split(),
    )
    plan = plan_of(made)
    params, grads = np.zeros(plan.layout.size), np.zeros(plan.layout.size)
    nn.initialize(made.model, plan.layout, params, 1)
    model = make_model(made, plan, [Cpu()], TrainingState(plan.layout))
    model.bind(params, grads)
    accumulation, announced = GradientAccumulation(model, [grads]), []
    accumulation.forward(batch(), [BATCH])
    accumulation.backward(announced.append)
    assert announced == ([plan.layer_starts[1], 0] if container is Pair else [0])


# BATCH parts are tested with one device only: each part must have an example for each device.
@pytest.mark.parametrize(
    ("devices", "parts"), [(1, [4, 3]), (1, [1, 4, 2]), (1, [1] * BATCH), (2, [4, 3]), (2, [2, 3, 2])], ids=str
)
def test_accumulation_gives_the_gradient_of_the_batch(parts: list[int], devices: int) -> None:
    """Announced ranges are final. In the model, no result of an example depends on the other examples of its batch."""
    results = []
    for micro_batches in ([BATCH], parts):
        made = Job(
            model=nn.Sequential(nn.Flatten(), nn.Dense(60, 5), nn.Tanh(), nn.Dropout(0.3), nn.Dense(5, 3)),
            loss=nn.SoftmaxCrossEntropy(),
            optimizer=optim.sgd(0.1),
            train=split(),
        )
        plan = plan_of(made)
        params, grads = np.zeros(plan.layout.size), np.zeros(plan.layout.size)
        nn.initialize(made.model, plan.layout, params, 1)
        model = make_model(made, plan, [Cpu(i) for i in range(devices)], TrainingState(plan.layout))
        model.bind(params, grads)
        accumulation = GradientAccumulation(model, [grads], [[0, *[1] * (len(micro_batches) - 1)]])
        final = np.full_like(grads, np.nan)

        def keep(start: int, final: Array = final, grads: Array = grads) -> None:
            new = np.isnan(final[start:])
            final[start:][new] = grads[start:][new]

        for _ in range(2):
            final[:] = np.nan
            loss = float(accumulation.forward(batch(), micro_batches))
            accumulation.backward(keep)
        assert (final == grads).all()
        results.append((loss, grads.copy()))
        model.close()
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-12)
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("devices", [2, 3, BATCH])
def test_several_devices_are_one(devices: int) -> None:
    """The parts may be unequal; Dropout's masks and BatchNorm's statistics are those of the whole batch."""
    loss, grads = gradient(1)
    other_loss, other = gradient(devices)
    assert other_loss == pytest.approx(loss, rel=1e-12)
    gaps = np.isnan(grads)  # gaps between parameters, which are not written
    np.testing.assert_allclose(other[~gaps], grads[~gaps], rtol=1e-10, atol=1e-14)
    assert not np.isnan(other).any()


def test_evaluation_uses_the_parameters_bound_last() -> None:
    made = job()
    plan = plan_of(made)
    params, others, grads = (np.zeros(plan.layout.size) for _ in range(3))
    nn.initialize(made.model, plan.layout, params, 1)
    nn.initialize(made.model, plan.layout, others, 2)
    model = make_model(made, plan, [Cpu()], TrainingState(plan.layout))

    def loss(vector: Array) -> float:
        model.bind(vector, grads)
        return model.evaluate(batch())[0]

    first, second = loss(params), loss(others)
    assert first != second
    params[:] = others
    assert loss(params) == second


def test_several_devices_twice_are_the_same_bits() -> None:
    assert gradient(3)[1].tobytes() == gradient(3)[1].tobytes()


def test_what_is_summed_over_workers_has_been_summed_over_devices() -> None:
    one: list[Array] = []
    three: list[Array] = []
    gradient(1, summing=one)
    gradient(3, summing=three)
    assert len(one) == len(three) == 6  # for each of two batches: means, moments and their gradient
    for a, b in zip(one, three, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("bad", [20, 22, 24], ids=["the first", "the second", "the last"])
def test_a_device_that_fails_is_reported_and_keeps_none_waiting(bad: int) -> None:
    """The device fails before BatchNorm, where the other devices wait for its sums."""
    with pytest.raises(ArithmeticError, match="a replica of this layer"):
        gradient(3, Counting(bad))


def test_a_group_of_the_optimizer_without_parameters_is_refused() -> None:
    made = job()
    made.optimizer = optim.adam(0.1, groups={"*.weight": {"eps": 1e-6}, "dens1.*": {"learning_rate": 0.2}})
    with pytest.raises(JobError, match=r"dens1\.\*.*dense1\.weight"):
        plan_of(made)
