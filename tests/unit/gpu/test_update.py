"""``GpuUpdate`` compared with ``Updater``, with NumPy arrays in place of CuPy's, and emulated kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpitrain import optim
from mpitrain.gpu import ops as launch
from mpitrain.gpu.ops import updates
from mpitrain.gpu.update import GpuBackend, GpuUpdate

from ...support.kernel_device import Device
from ...support.optimizers import LAYOUT, SIZE, Run, amsgrad, draw, lamb_of_amsgrad, lars_of_amsgrad

GPU: Any = SimpleNamespace(xp=np, empty=np.empty, zeros=np.zeros, copy_of=np.array)


OPTIMIZERS = [
    optim.sgd(0.1),
    optim.adamw(0.01, clip_norm=0.5),
    optim.lamb(0.01, weight_decay=0.1),
    optim.lars(0.5, weight_decay=0.01, clip_norm=2.0),
    amsgrad(0.1),
    amsgrad(optim.exponential(0.1, 0.5, 3), clip_norm=0.5, weight_decay=0.1),
    amsgrad(0.1, clip_norm=5.0, l2=0.1),
    amsgrad(0.1, clip_norm=1e9, decay_names="*", weight_decay=0.1),
    optim.adamw(0.01, rate_factors={"*.weight": 0.1}),
    optim.lamb(0.01, rate_factors={"*.weight": 0.1}),
    amsgrad(0.1, rate_factors={"*.weight": 0.1}),
    optim.adamw(0.01, clip_norm=0.5, rate_factors={"dense1.bias": 0.1}),
    optim.adam(0.01, clip_norm=0.5, groups={"*.bias": {"beta1": 0.5, "eps": 0.1, "weight_decay": 0.1}}),
    optim.momentum(0.1, groups={"dense2.*": {"momentum": 0.5, "nesterov": True, "learning_rate": 0.3}}),
    optim.lars(0.5, groups={"dense2.*": {"trust": 0.1, "weight_decay": 0.1}}),
    amsgrad(0.1, weight_decay=0.1, groups={"*.bias": {"beta1": 0.5, "l2": 0.1, "weight_decay": 0.0}}),
    lamb_of_amsgrad(0.1, weight_decay=0.1),
    lars_of_amsgrad(0.1, weight_decay=0.1, clip_norm=2.0),
]


class GpuRun(Run):
    """A run whose vectors ``GpuUpdate`` changes."""

    def __init__(self, device: Device, optimizer: optim.Optimizer, moving: optim.moving_average | None) -> None:
        super().__init__(optimizer, np.float64, moving)
        launch.use(device.places[0])
        self.state = np.ones(9)
        vectors = {"params": self.params, **self.slots} | ({} if self.average is None else {"average": self.average})
        self.frozen = np.zeros(len(LAYOUT.entries), np.uint8)
        self.apply = GpuUpdate(GPU, optimizer, LAYOUT, vectors, moving, self.state, self.frozen)


@pytest.mark.parametrize(
    "optimizer",
    [optim.adamw(0.1), amsgrad(0.1, weight_decay=0.1), optim.lamb(0.1), optim.adam(0.1, clip_norm=1.0, l2=0.1)],
    ids=str,
)
def test_frozen_parameters_do_not_change(device: Device, optimizer: optim.Optimizer) -> None:
    run = GpuRun(device, optimizer, optim.moving_average(0.9))
    before = run.everything()
    run.frozen[0] = 1
    run.apply(draw(1), 0)
    changed = LAYOUT.views(run.everything()[:SIZE] != before[:SIZE])
    assert not changed["dense1.weight"].any() and changed["dense2.weight"].all()


@pytest.mark.parametrize("moving", [None, optim.moving_average(0.9)], ids=["", "average"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_steps_agree_with_those_of_the_processor(
    device: Device, optimizer: optim.Optimizer, moving: optim.moving_average | None
) -> None:
    here, there = Run(optimizer, np.float64, moving), GpuRun(device, optimizer, moving)
    trained = np.arange(SIZE) < LAYOUT.n_trained
    for step in range(4):
        scale, grads = 2.0**step, draw(step + 1)
        there.state[updates.FACTOR] = 1 / scale
        there.apply(np.where(trained, scale, 1.0) * grads, step)
        here.step(grads[np.newaxis], step)
        np.testing.assert_allclose(there.everything(), here.everything(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_a_step_that_is_called_off_changes_nothing(device: Device, optimizer: optim.Optimizer) -> None:
    run = GpuRun(device, optimizer, optim.moving_average(0.9))
    run.apply(draw(1), 0)
    before = run.everything()
    run.state[updates.GO] = 0
    grads = draw(2)
    grads[3] = np.nan
    run.apply(grads, 1)
    assert np.array_equal(run.everything(), before)


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.sgd(0.1, l2=0.05),
        optim.momentum(0.05, clip_norm=0.5),
        optim.nesterov(0.05, 0.8),
        optim.adamw(0.01, weight_decay=0.5),
        optim.adagrad(0.1),
        optim.rmsprop(0.01, 0.9),
        optim.lamb(0.01, weight_decay=0.1),
        optim.lars(0.1, clip_norm=0.5),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_rows_and_ranges(device: Device, optimizer: optim.Optimizer) -> None:
    here, there = (Run(optimizer, np.float64, optim.moving_average(0.9)) for _ in range(2))
    launch.use(device.places[0])
    vectors = there.params, there.slots, there.average, optim.moving_average(0.9)
    there.updater = optim.Updater(optimizer, LAYOUT, *vectors, backend=lambda them: GpuBackend(GPU, np.ones(9), them))
    for step in range(3):
        rows = draw(step + 1, 3)
        for run in (here, there):
            run.step(rows, step, [0, 1001, SIZE], order=np.array([2, 0]))
    np.testing.assert_allclose(there.everything(), here.everything(), rtol=1e-9, atol=1e-12)
