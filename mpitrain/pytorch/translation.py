"""PyTorch's optimizers and learning-rate schedulers as those of ``mpitrain.optim``.

SGD, Adam and AdamW are translated, because compiled rules compute the same faster; the other optimizers run themselves
(``torch_rule``).
"""

from __future__ import annotations

import copy
import glob
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .. import optim
from ..errors import JobError
from ..optim.schedule import Schedule, by_epoch
from .names import parameters_of
from .torch_rule import ELEMENTWISE, TorchRule, options_of, state_of

Interval = Literal["epoch", "step"]
_COMPILED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_NOT_COMPILED = {"amsgrad": False, "maximize": False, "dampening": 0}  # with the only value that compiled rules have


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
        JobError: The optimizer or the scheduler is not supported.
    """
    kind = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise JobError(
            f"the optimizer {kind} is not supported: must be one of torch.optim ({names}), not a subclass, or one of "
            "mpitrain.optim; a script with another one runs over the MPI backend of torch.distributed"
        )
    groups = optimizer.param_groups
    if _has_taken_steps(optimizer):
        raise JobError(f"the optimizer {kind} has taken steps already: pass a new one")
    rate: float | Schedule = float(groups[0]["lr"])
    if scheduler is not None:
        rates = SchedulerRates(scheduler, optimizer)
        rate = by_epoch(rates) if interval == "epoch" else rates
    patterns = _patterns(kind, groups, model)
    make, options = _rule_of(optimizer)
    by_name = _by_name(options, patterns)
    for pattern, factor in _rate_factors(kind, groups, patterns, model).items():
        by_name["groups"].setdefault(pattern, {})["rate_factor"] = factor
    return make(rate, clip_norm=clip_norm, **by_name)


def _has_taken_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has state of steps; Adagrad makes its state at first."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values())


def _rule_of(optimizer: torch.optim.Optimizer) -> tuple[Callable[..., optim.Optimizer], list[dict[str, Any]]]:
    """Return what makes the optimizer of this package, and its options for each group."""
    groups = optimizer.param_groups
    is_compiled = type(optimizer) in _COMPILED and all(
        group.get(name, value) == value for group in groups for name, value in _NOT_COMPILED.items()
    )
    if is_compiled:
        return (_sgd if isinstance(optimizer, torch.optim.SGD) else _adam)(groups)
    options = []
    for group in groups:
        of_group = options_of(group)
        vectors, numbers = state_of(type(optimizer), of_group)
        options.append({"options": of_group, "vectors": vectors, "numbers": numbers})
    slots = dict.fromkeys(name for group in options for name in (*group["vectors"], *group["numbers"]))
    return partial(TorchRule, kind=type(optimizer), slots=tuple(slots)), options


def _sgd(groups: Sequence[Mapping[str, Any]]) -> tuple[type[optim.Optimizer], list[dict[str, Any]]]:
    """Return the optimizer of this package, and its options for each group."""
    options = [{"l2": float(group["weight_decay"])} for group in groups]
    if not any(group["momentum"] for group in groups):
        return optim.sgd, options
    for group, of_group in zip(groups, options, strict=True):
        of_group |= {"momentum": float(group["momentum"]), "nesterov": bool(group["nesterov"])}
    return optim.momentum, options


def _adam(groups: Sequence[Mapping[str, Any]]) -> tuple[type[optim.Optimizer], list[dict[str, Any]]]:
    """Return the optimizer of this package, and its options for each group."""
    options = []
    for group in groups:
        (beta1, beta2), decay = map(float, group["betas"]), float(group["weight_decay"])
        decays = {"l2": 0.0, "weight_decay": decay} if _is_decoupled(group) else {"l2": decay, "weight_decay": 0.0}
        options.append({"beta1": beta1, "beta2": beta2, "eps": float(group["eps"]), **decays})
    return optim.adamw if any(map(_is_decoupled, groups)) else optim.adam, options


def _is_decoupled(group: Mapping[str, Any]) -> bool:
    """Whether an Adam subtracts weight decay from the parameters, as AdamW does."""
    return bool(group.get("decoupled_weight_decay"))


def _patterns(kind: str, groups: Sequence[Mapping[str, Any]], model: nn.Module) -> list[list[str]]:
    """Return patterns that match only the names of a group's parameters, for each group."""
    names = {id(parameter): glob.escape(name) for name, parameter in parameters_of(model)}
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                shape = tuple(parameter.shape)
                raise JobError(f"{kind} has a parameter of shape {shape} that the model does not have")
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


def _rate_factors(
    kind: str, groups: Sequence[Mapping[str, Any]], patterns: Sequence[list[str]], model: nn.Module
) -> dict[str, float]:
    """Return the ratios to the first group's learning rate; 0 for parameters that the optimizer does not have."""
    first = _rate(groups[0])
    factors = {glob.escape(name): 0.0 for name, _ in parameters_of(model)}
    for group, of_group in zip(groups, patterns, strict=True):
        if _rate(group) != first and not first:
            raise JobError(f"{kind}: the learning rate of the first parameter group is 0: must be above 0")
        for pattern in of_group:
            factors[pattern] = 1.0 if _rate(group) == first else _rate(group) / first
    return {pattern: factor for pattern, factor in factors.items() if factor != 1.0}


def _by_name(options: list[dict[str, Any]], patterns: Sequence[list[str]]) -> dict[str, Any]:
    """Return the first group's options, and as ``groups`` the options in which other groups differ from it.

    Groups that differ only in whether they decay become one group, in which ``decay_names`` selects what decays.
    """
    decay_names: str | list[str] = "*"
    decays = [{name: group[name] for name in ("l2", "weight_decay") if group.get(name)} for group in options]
    used = [decay for decay in decays if decay]
    if all(decay == used[0] for decay in used):
        decay_names = [pattern for decay, names in zip(decays, patterns, strict=True) if decay for pattern in names]
        options = [group | (used[0] if used else {}) for group in options]
    first = options[0]
    groups = {
        pattern: {name: value for name, value in group.items() if value != first[name]}
        for group, names in zip(options, patterns, strict=True)
        for pattern in names
    }
    return {
        **first,
        "decay_names": decay_names,
        "groups": {pattern: different for pattern, different in groups.items() if different},
    }


def _rate(group: Mapping[str, Any]) -> float:
    """Return a group's learning rate before a scheduler has changed it."""
    return float(group.get("initial_lr", group["lr"]))


def _required(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the arguments that the constructor of an optimizer needs, besides its groups."""
    return {"lr": float(optimizer.param_groups[0]["lr"])}
