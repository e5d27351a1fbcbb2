"""PyTorch's optimizers as optimizers of ``mpitrain.optim``.

SGD, Adam and AdamW are translated, because compiled rules compute the same updates faster. For other optimizers,
PyTorch's own code is called. Elementwise optimizers update parts of the vectors (``torch_rule``), and the others update
whole tensors (``whole_tensors``).
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from .. import optim
from ..core.layout import Array
from ..errors import JobError
from ..optim.schedule import Schedule, as_schedule
from .bfloat16 import is_copied
from .names import parameters_of
from .torch_rule import ELEMENTWISE, TorchRule, options_of, state_of
from .whole_tensors import TorchTensors

_COMPILED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_NOT_COMPILED = {"amsgrad": False, "maximize": False, "dampening": 0}  # the only values that compiled rules support


class GroupRate:
    """The learning rate of a parameter group, which a script or a scheduler may change during training.

    See ``optim.schedule.LiveRate`` for the methods.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        self._optimizer, self._index = optimizer, index  # ``load_state_dict`` replaces the groups
        self._bound: tuple[Array, int] | None = None
        group = optimizer.param_groups[index]
        self.initial = float(group.get("initial_lr", group["lr"]))  # before a scheduler has changed it

    def __repr__(self) -> str:
        # The value is left out, because schedulers may have set it on the workers only.
        return f"{type(self).__name__}()"

    def __call__(self, step: int) -> float:
        if self._bound is None:
            return self.as_set()
        values, index = self._bound
        return float(values[index])

    def as_set(self) -> float:
        return float(self._optimizer.param_groups[self._index]["lr"])

    def bind(self, values: Array, index: int) -> None:
        self._bound = values, index


def translated(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    rates: Sequence[Schedule] | None = None,
    clip_norm: float | None = None,
    index: int | None = None,
) -> optim.Optimizer:
    """Return the optimizer of this package that computes the same updates.

    Parameters of the model that the optimizer does not have keep their values.

    Args:
        rates: The learning rate of each parameter group; None for the groups' present rates.
        clip_norm: Maximum Euclidean norm of the whole gradient.
        index: The optimizer's position if there are several optimizers, which then update whole tensors; else None.

    Raises:
        JobError: The optimizer is not supported.
    """
    _check(optimizer)
    patterns = _patterns(optimizer, model)
    if rates is None:
        rates = [as_schedule(float(group["lr"])) for group in optimizer.param_groups]
    if index is not None or type(optimizer) not in ELEMENTWISE:
        return _of_whole_tensors(optimizer, model, rates[0], clip_norm, index)
    make, options = _rule_of(optimizer)
    for of_group, rate in zip(options, rates, strict=True):
        of_group["learning_rate"] = rate
    by_name = _by_name(options, patterns)
    optimized = set(chain.from_iterable(patterns))
    for name, _ in parameters_of(model):
        if (pattern := glob.escape(name)) not in optimized:
            by_name["groups"].setdefault(pattern, {})["rate_factor"] = 0.0
    return make(clip_norm=clip_norm, **by_name)


def _check(optimizer: torch.optim.Optimizer) -> None:
    """Raise a JobError if an optimizer is not supported."""
    wrapped = next((value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)), None)
    if isinstance(optimizer, torch.optim.LBFGS):
        why = "it calls the loss itself"
    elif isinstance(optimizer, torch.optim.SparseAdam):
        why = "it needs sparse gradients"
    elif wrapped is not None:
        why = f"it wraps another optimizer, {type(wrapped).__name__}, whose state would be lost"
    elif not all("lr" in group for group in optimizer.param_groups):
        why = "it has a parameter group without 'lr', which a scheduler, and the log, need"
    else:
        return
    raise JobError(
        f"the optimizer {type(optimizer).__name__} is not supported, because {why}: use another one, or run the script "
        "over the MPI backend of torch.distributed"
    )


def _of_whole_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, rate: Schedule, clip_norm: float | None, index: int | None
) -> optim.Optimizer:
    """Return an optimizer that updates whole tensors; raise a JobError if a tensor is not float32."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = {name: parameter for name, parameter in parameters_of(model) if id(parameter) in own}
    copied = next((name for name, parameter in parameters.items() if is_copied(parameter)), None)
    if copied is not None:
        which = "one of several optimizers" if index is not None else type(optimizer).__name__
        raise JobError(
            f"the parameter {copied} is bfloat16, but {which} updates whole tensors, which must be float32: call "
            "model.float(), and use torch.autocast"
        )
    return TorchTensors(rate, optimizer=optimizer, parameters=parameters, index=index, clip_norm=clip_norm)


def _rule_of(optimizer: torch.optim.Optimizer) -> tuple[Callable[..., optim.Optimizer], list[dict[str, Any]]]:
    """Return the function that makes the optimizer of this package, and its options for each group."""
    groups = optimizer.param_groups
    is_compiled = type(optimizer) in _COMPILED and all(
        group.get(name, value) == value for group in groups for name, value in _NOT_COMPILED.items()
    )
    if is_compiled:
        return (_sgd if isinstance(optimizer, torch.optim.SGD) else _adam)(groups)
    options = []
    for group in groups:
        of_group = options_of(optimizer, group)
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
    """Return whether an Adam subtracts weight decay from the parameters, as AdamW does."""
    return bool(group.get("decoupled_weight_decay"))


def _patterns(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Return patterns that match only the names of a group's parameters, for each group."""
    names = {id(parameter): glob.escape(name) for name, parameter in parameters_of(model)}
    groups = [group["params"] for group in optimizer.param_groups]
    for parameter in chain.from_iterable(groups):
        if id(parameter) not in names:
            kind, shape = type(optimizer).__name__, tuple(parameter.shape)
            raise JobError(f"{kind} has a parameter of shape {shape} that the model does not have")
    return [[names[id(parameter)] for parameter in group] for group in groups]


def _by_name(options: list[dict[str, Any]], patterns: Sequence[list[str]]) -> dict[str, Any]:
    """Return the first group's options, and as ``groups`` the options in which other groups differ from it.

    Groups that differ only in whether they decay become one group, in which ``decay_names`` selects the decayed
    parameters.
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
