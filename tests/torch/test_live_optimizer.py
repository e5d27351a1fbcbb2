"""The schedulers of an optimizer are found, whenever they are made, and continue with their state."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from mpitrain.pytorch.live_optimizer import LiveOptimizer, live_optimizer

MODEL = nn.Linear(2, 2)


class Halving(lr_scheduler.LRScheduler):
    """A user's own scheduler, which does not call the constructor of its base class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int | None = None) -> None:
        self.optimizer.param_groups[0]["lr"] /= 2


class Owner:
    """Does nothing; see ``live_optimizer.Owner``."""

    def step(self) -> None: ...
    def collect_state(self) -> None: ...
    def drop_state(self) -> None: ...
    def use_state(self) -> None: ...


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(MODEL.parameters(), 0.1)


def tracked(optimizer: torch.optim.Optimizer) -> LiveOptimizer:
    return live_optimizer(optimizer, MODEL, None, None, Owner())


def found(live: LiveOptimizer) -> list[str]:
    return [name for name, _ in live.state()["schedulers"]]


def test_schedulers_are_found_but_not_their_parts() -> None:
    optimizer, other = sgd(), sgd()
    parts: list[Any] = [lr_scheduler.LinearLR(optimizer), lr_scheduler.ConstantLR(optimizer)]
    parts = [lr_scheduler.ChainedScheduler(parts), lr_scheduler.StepLR(optimizer, 1)]
    schedules: list[Any] = [lr_scheduler.SequentialLR(optimizer, parts, [2])]
    del parts
    live, live_other = tracked(optimizer), tracked(other)
    schedules += [lr_scheduler.ReduceLROnPlateau(optimizer), Halving(optimizer)]
    schedules.append(lr_scheduler.ExponentialLR(other, 0.5))
    assert found(live) == ["Halving", "ReduceLROnPlateau", "SequentialLR"]
    assert found(live_other) == ["ExponentialLR"]
    schedules.clear()
    assert found(live) == found(live_other) == []


@pytest.mark.filterwarnings("ignore:Detected call of")  # no optimizer takes steps here
@pytest.mark.parametrize("collects", [False, True])
def test_schedulers_of_one_class_continue_with_their_own_state(collects: bool) -> None:
    def make() -> tuple[LiveOptimizer, list[lr_scheduler.StepLR]]:
        optimizer = sgd()
        first = lr_scheduler.StepLR(optimizer, 1, 0.5)
        if collects:
            gc.collect(0)  # after this, the collector lists the second scheduler first
        return tracked(optimizer), [first, lr_scheduler.StepLR(optimizer, 1, 0.25)]

    live, (by_epoch, by_step) = make()
    by_epoch.step()
    for _ in range(3):
        by_step.step()
    for generation in range(3):  # now it lists the first scheduler first
        gc.collect(generation)
    resumed, schedules = make()
    resumed.load_state(live.state())
    assert [schedule.state_dict() for schedule in schedules] == [by_epoch.state_dict(), by_step.state_dict()]
