"""An optimizer of torch that updates whole tensors: it runs itself, on the parameters of the model."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.extra_state import ExtraState, Versioned, values_of
from ..core.layout import Array
from ..optim.whole_tensors import WholeTensorOptimizer
from .state_tree import flatten, unflatten

_DIVISIBLE = (torch.optim.Adafactor, torch.optim.Muon)
_TRIALS = 4
_NAMESPACE = "optimizer: "  # followed by the name of a parameter
_VERSION = 1


@dataclass(frozen=True)
class TorchTensors(WholeTensorOptimizer):
    """Updates with any optimizer of torch, whose step is called with those parameters alone that it shall update.

    Attributes:
        optimizer: The optimizer, with the options that its groups have at each update.
        parameters: The parameters of the model by name.
        own: The names of those that this rank updates, of which alone it keeps state.
    """

    optimizer: Any = field(default=None, kw_only=True)
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict, kw_only=True, repr=False)
    own: set[str] = field(default_factory=set, kw_only=True, repr=False, compare=False)

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    def update_tensors(self, grads: Mapping[str, Array]) -> None:
        gradients = {id(self.parameters[name]): torch.from_numpy(each) for name, each in grads.items()}
        with _restricted(self.optimizer, gradients) as has_parameters:
            if has_parameters:
                type(self.optimizer).step(self.optimizer)  # its own method ``step`` may be that of the Trainer

    def tensor_state(self) -> ExtraState:
        return {
            _NAMESPACE + name: Versioned(_VERSION, flatten(f"the optimizer {self.name}", state))
            for name, state in self.own_state().items()
        }

    def can_divide(self) -> bool:
        """Try the optimizer on copies of two parameters, together and each alone; return whether the results agree."""
        parameters = sorted((p for group in self.optimizer.param_groups for p in group["params"]), key=Tensor.numel)[:2]
        if type(self.optimizer) in _DIVISIBLE or len(parameters) < 2:
            return True
        try:
            together, alone = (_try(self.optimizer, parameters, divided) for divided in (False, True))
        except Exception:  # of the script's code, which may not expect other parameters
            return False
        return all(torch.equal(first, second) for first, second in zip(together, alone, strict=True))

    def begin(self, names: Sequence[str], state: ExtraState) -> None:
        self.own.clear()
        self.own.update(names)
        self.drop_state_of_others()
        stored = [name for name in state if name.startswith(_NAMESPACE)]
        if stored:
            self.optimizer.state.clear()
        for name in stored:
            values = values_of(state, name, _VERSION)  # counts as used, although it may be another rank's
            if (own := name.removeprefix(_NAMESPACE)) in self.own and own in self.parameters:
                self.optimizer.state[self.parameters[own]] = unflatten(values)

    def drop_state_of_others(self) -> None:
        """Remove the state of the parameters that other ranks update."""
        for name, parameter in self.parameters.items():
            if name not in self.own:
                self.optimizer.state.pop(parameter, None)

    def own_state(self) -> dict[str, dict[str, Any]]:
        """Return the state of the parameters that this rank updates, by their names."""
        return {
            name: dict(self.optimizer.state[self.parameters[name]])
            for name in sorted(self.own)
            if self.parameters.get(name) in self.optimizer.state
        }

    def numbers_to_average(self) -> list[Array]:
        return [
            value.detach().reshape(-1).numpy()
            for state in self.own_state().values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64) and value.is_contiguous()
        ]


def _try(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], divided: bool) -> list[Tensor]:
    """Return copies of parameters after some steps with random gradients.

    Args:
        divided: Whether each step updates one parameter after the other.
    """
    copies = [each.detach().clone().requires_grad_() for each in parameters]
    copy_of = dict(zip(map(id, parameters), copies, strict=True))
    other = object.__new__(type(optimizer))
    other.__dict__.update({name: copy.copy(value) for name, value in vars(optimizer).items() if "hook" not in name})
    other.__dict__.update({name: OrderedDict() for name in vars(optimizer) if "hook" in name})
    other.state = defaultdict(dict)
    other.param_groups = [
        {**group, "params": [copy_of[id(each)] for each in group["params"] if id(each) in copy_of]}
        for group in optimizer.param_groups
    ]
    with torch.random.fork_rng(devices=[]):
        for number in range(_TRIALS):
            torch.manual_seed(number)
            gradients = {id(each): torch.randn_like(each) for each in copies}
            for chosen in [[each] for each in copies] if divided else [copies]:
                with _restricted(other, {id(each): gradients[id(each)] for each in chosen}):
                    type(other).step(other)
    return copies


@contextmanager
def _restricted(optimizer: torch.optim.Optimizer, gradients: Mapping[int, Tensor]) -> Iterator[bool]:
    """Let an optimizer have only the parameters with these ids, and those gradients; yield whether it has any."""
    groups = optimizer.param_groups
    before = [(group, group["params"]) for group in groups]
    chosen = [each for _, params in before for each in params if id(each) in gradients and each.requires_grad]
    shown = [each.grad for each in chosen]
    try:
        for each in chosen:
            each.grad = gradients[id(each)]
        for group, params in before:
            group["params"] = [each for each in params if id(each) in gradients and each.requires_grad]
        optimizer.param_groups = [group for group in groups if group["params"]]
        yield bool(chosen)
    finally:
        optimizer.param_groups = groups
        for group, params in before:
            group["params"] = params
        for each, gradient in zip(chosen, shown, strict=True):
            each.grad = gradient
