"""An optimizer of torch as a rule for flat vectors: torch's own code updates each part of the vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from ..core.layout import Array
from ..optim.optimizer import Optimizer, Slots

# Optimizers whose update of an element depends on no other element, by exact type.
ELEMENTWISE = (Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD)
# Options that choose an implementation.
_IMPLEMENTATION = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}


@dataclass(frozen=True)
class TorchRule(Optimizer):
    """Updates with an optimizer of torch, which has one flat parameter.

    Its state of the same shape as the parameter is in slots of the same names. A number in the state, such as
    ``mu_product`` of NAdam, is stored in every element of a slot. The number ``step`` is not stored, because it is the
    step of the run.

    Attributes:
        kind: The class of the optimizer, one of ``ELEMENTWISE``.
        options: The options of a parameter group, without its parameters and its learning rate.
        vectors, numbers: Names of the state, from ``state_of``; the names of a group may differ from those of other
            groups.
        slots: The names of the state of all groups.
    """

    kind: type[torch.optim.Optimizer] = field(default=SGD, kw_only=True)
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    vectors: tuple[str, ...] = field(default=(), kw_only=True)
    numbers: tuple[str, ...] = field(default=(), kw_only=True)
    slots: tuple[str, ...] = field(default=(), kw_only=True)  # type: ignore[misc]

    changes_at_rate_zero = True
    part = 1 << 20

    @property
    def name(self) -> str:
        return self.kind.__name__

    def check(self) -> None:
        """Do nothing: torch's rules need no check, and the slot of a number depends on all its elements."""

    def update(self, params: Array, grads: Array, slots: Slots, rate: float, step: int) -> None:
        parameter, optimizer = _tensor(params), self._optimizer
        parameter.grad = _tensor(grads)
        (group,) = optimizer.param_groups
        group["params"], group["lr"] = [parameter], rate
        optimizer.state.clear()
        if step > 0 or self.kind is Adagrad:  # otherwise step() makes the state
            state = {"step": torch.tensor(float(step), device="cpu")}
            state |= {name: _tensor(slots[name]) for name in self.vectors}
            # The maximum, not the first element, because the gaps between parameters are zero after a resume.
            state |= {name: torch.tensor(float(slots[name].max()), device="cpu") for name in self.numbers}
            self._set_initial(state, rate)
            optimizer.state[parameter] = state
        optimizer.step()
        state = optimizer.state[parameter]
        for name in self.vectors:
            slot = _tensor(slots[name])
            if state[name].data_ptr() != slot.data_ptr():
                slot.copy_(state[name])
        for name in self.numbers:
            slots[name][...] = float(state[name])

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        return _make(self.kind, torch.zeros(1, device="cpu"), self.options)

    def _set_initial(self, state: dict[str, torch.Tensor], rate: float) -> None:
        """Set state that is not zero at first, for parameters that were not trained before."""
        if self.kind is Rprop:
            state["step_size"][state["step_size"] == 0] = rate
        elif self.kind is Adagrad:
            state["sum"][state["sum"] == 0] = self.options["initial_accumulator_value"]


def state_of(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of an optimizer's state that has the parameter's shape, and of its numbers except ``step``."""
    parameter = torch.zeros(3, device="cpu")
    parameter.grad = torch.ones(3, device="cpu")
    optimizer = _make(kind, parameter, options)
    optimizer.step()
    shapes = {
        name: value.shape if isinstance(value, torch.Tensor) else ()
        for name, value in optimizer.state[parameter].items()
        if value is not None and name != "step"
    }
    vectors = tuple(name for name, shape in shapes.items() if shape == parameter.shape)
    return vectors, tuple(name for name in shapes if name not in vectors)


def options_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's options that determine updates, without learning rate and keys of schedulers."""
    return {
        name: group[name]
        for name in optimizer.defaults
        if name in group and name != "lr" and name not in _IMPLEMENTATION
    }


def _make(
    kind: type[torch.optim.Optimizer], parameter: torch.Tensor, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return an optimizer of one parameter, with the implementation for one tensor."""
    optimizer = kind([parameter], lr=0.1)  # type: ignore[call-arg]
    (group,) = optimizer.param_groups
    group.update(options)
    group.update({name: value for name, value in _IMPLEMENTATION.items() if name in group})
    return optimizer


def _tensor(array: Array) -> torch.Tensor:
    """Return a tensor that shares the memory of an array, which is CuPy's on a GPU."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.as_tensor(array, device="cuda")
