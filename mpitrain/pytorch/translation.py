"""PyTorch's optimizers and learning-rate schedulers, translated to those of ``mpitrain.optim``."""

from __future__ import annotations

import copy
import glob
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .. import optim
from ..errors import JobError
from ..optim.schedule import Schedule, by_epoch
from .network import parameters_of

Interval = Literal["epoch", "step"]
# Options of torch's optimizers that select an implementation, not a result.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
_UNSUPPORTED = {"amsgrad": False, "maximize": False, "dampening": 0}  # with their only valid value
_PER_GROUP = {"params", "param_names", "lr", "initial_lr", "weight_decay"}


class SchedulerRates:
    """The learning rates of the first parameter group under a scheduler of torch, as a function of its steps.

    The scheduler is copied with an optimizer of its own, so that the script's objects do not change.

    Raises:
        JobError: The scheduler needs values that are measured during training, or changes more than learning rates.
    """

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._name = type(scheduler).__name__
        if isinstance(scheduler, ReduceLROnPlateau) or not hasattr(scheduler, "get_last_lr"):
            raise JobError(f"the scheduler {self._name} is not supported: its rates must be known before training")
        groups = [{**group, "params": [torch.zeros(1)]} for group in optimizer.param_groups]
        self._optimizer = type(optimizer)(groups, **_required(optimizer))
        self._scheduler = copy.deepcopy(scheduler, {id(optimizer): self._optimizer})
        self._others = self._options()
        self._first = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._rates = [self._first[0]]

    def __repr__(self) -> str:
        return f"{self._name}({self(0):.9g}, {self(1):.9g}, ...)"

    def __call__(self, count: float) -> float:
        """Return the rate after ``count`` steps of the scheduler, rounded down."""
        while len(self._rates) <= count + 1e-9:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the optimizer takes no steps
                try:
                    self._scheduler.step()
                except ValueError as error:
                    raise JobError(f"{self._name} has no rate after {len(self._rates)} steps: {error}") from error
            rates = [float(group["lr"]) for group in self._optimizer.param_groups]
            if self._options() != self._others:
                raise JobError(f"{self._name} changes the momentum, which is not supported; pass cycle_momentum=False")
            if any(
                abs(rate * self._first[0] - first * rates[0]) > 1e-6 * first * self._first[0]
                for rate, first in zip(rates, self._first, strict=True)
            ):
                raise JobError(f"{self._name} changes the ratio of the parameter groups' rates, which is not supported")
            self._rates.append(rates[0])
        return self._rates[int(count + 1e-9)]

    def _options(self) -> list[dict[str, Any]]:
        """Return what a scheduler must not change."""
        return [
            {name: value for name, value in group.items() if name in ("momentum", "betas", "weight_decay")}
            for group in self._optimizer.param_groups
        ]


def translated(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    scheduler: Any = None,
    interval: Interval = "epoch",
    clip_norm: float | None = None,
) -> optim.Optimizer:
    """Return the optimizer of this package that computes the same updates.

    Parameters of the model that the optimizer does not have keep their values.

    Args:
        scheduler: A learning-rate scheduler of the optimizer, or None.
        interval: Whether the scheduler counts epochs or steps.
        clip_norm: Maximum Euclidean norm of the whole gradient.

    Raises:
        JobError: The optimizer, one of its options or the scheduler is not supported.
    """
    kind = type(optimizer)
    make = {torch.optim.SGD: _sgd, torch.optim.Adam: _adam, torch.optim.AdamW: _adamw}.get(kind)
    if make is None:
        raise JobError(
            f"the optimizer {kind.__name__} is not supported: use torch.optim.SGD, Adam or AdamW, or one of "
            "mpitrain.optim"
        )
    if optimizer.state:
        raise JobError(f"the optimizer {kind.__name__} has taken steps already: pass a new one")
    first, *others = groups = optimizer.param_groups
    for group in others:
        for name in group.keys() - _PER_GROUP - _IMPLEMENTATION:
            if group[name] != first[name]:
                raise JobError(f"the parameter groups of {kind.__name__} have different {name}: must be the same")
    for name, valid in _UNSUPPORTED.items():
        if first.get(name, valid) != valid:
            raise JobError(f"{kind.__name__}({name}={first[name]!r}) is not supported: must be {valid!r}")
    rate: float | Schedule = float(first["lr"])
    if scheduler is not None:
        rates = SchedulerRates(scheduler, optimizer)
        rate = by_epoch(rates) if interval == "epoch" else rates
    names = {id(each): name for name, each in parameters_of(model)}
    return make(first, rate, clip_norm=clip_norm, **_by_name(kind.__name__, groups, names))


def _sgd(group: Mapping[str, Any], rate: float | Schedule, decay: float, **shared: Any) -> optim.Optimizer:
    if not group["momentum"]:
        return optim.sgd(rate, l2=decay, **shared)
    return optim.momentum(rate, float(group["momentum"]), bool(group["nesterov"]), l2=decay, **shared)


def _adam(group: Mapping[str, Any], rate: float | Schedule, decay: float, **shared: Any) -> optim.Optimizer:
    if group.get("decoupled_weight_decay"):
        return _adamw(group, rate, decay, **shared)
    return optim.adam(rate, l2=decay, **_moments(group), **shared)


def _adamw(group: Mapping[str, Any], rate: float | Schedule, decay: float, **shared: Any) -> optim.Optimizer:
    return optim.adamw(rate, weight_decay=decay, **_moments(group), **shared)


def _moments(group: Mapping[str, Any]) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {"beta1": float(beta1), "beta2": float(beta2), "eps": float(group["eps"])}


def _by_name(kind: str, groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> dict[str, Any]:
    """Return the options that select parameters by name."""
    factors, decayed, decays = dict[str, float](), list[str](), set[float]()
    first = _rate(groups[0])
    known = set[str]()
    for group in groups:
        for each in group["params"]:
            if id(each) not in names:
                raise JobError(f"{kind} has a parameter of shape {tuple(each.shape)} that the model does not have")
            name = names[id(each)]
            known.add(name)
            if _rate(group) != first:
                if not first:
                    raise JobError(f"{kind}: the learning rate of the first parameter group is 0: must be above 0")
                factors[glob.escape(name)] = _rate(group) / first
            if group["weight_decay"]:
                decays.add(float(group["weight_decay"]))
                decayed.append(glob.escape(name))
    if len(decays) > 1:
        values = ", ".join(map(str, sorted(decays)))
        raise JobError(f"the parameter groups of {kind} have weight_decay {values}: must be one value, or 0")
    factors |= {glob.escape(name): 0.0 for name in names.values() if name not in known}
    return {"decay": next(iter(decays), 0.0), "decay_names": decayed, "rate_factors": factors}


def _rate(group: Mapping[str, Any]) -> float:
    """Return a group's learning rate before a scheduler has changed it."""
    return float(group.get("initial_lr", group["lr"]))


def _required(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the arguments that the constructor of an optimizer needs, besides its groups."""
    return {"lr": float(optimizer.param_groups[0]["lr"])}
