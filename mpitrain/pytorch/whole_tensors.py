"""An optimizer of torch that updates whole tensors: it runs itself, on the parameters of the model."""

from __future__ import annotations

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

_NAMESPACE = "optimizer: "  # followed by the name of a parameter
_VERSION = 1


@dataclass(frozen=True)
class TorchTensors(WholeTensorOptimizer):
    """Updates with any optimizer of torch, whose step is called with those parameters alone that it shall update.

    Attributes:
        optimizer: The optimizer, with the options that its groups have at each update.
        parameters: The parameters of the model by name.
    """

    optimizer: Any = field(default=None, kw_only=True)
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict, kw_only=True, repr=False)

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    def update_tensors(self, grads: Mapping[str, Array]) -> None:
        gradients = {id(self.parameters[name]): torch.from_numpy(each) for name, each in grads.items()}
        with _restricted(self.optimizer, gradients) as has_parameters:
            if has_parameters:
                type(self.optimizer).step(self.optimizer)  # its own method ``step`` may be that of the Trainer

    def tensor_state(self, names: Sequence[str]) -> ExtraState:
        state = self.optimizer.state
        return {
            _NAMESPACE + name: Versioned(_VERSION, flatten(f"the optimizer {self.name}", dict(state[parameter])))
            for name in names
            if (parameter := self.parameters.get(name)) in state
        }

    def load_tensor_state(self, names: Sequence[str], state: ExtraState) -> None:
        for name in state:
            if name.startswith(_NAMESPACE):
                stored = values_of(state, name, _VERSION)  # counts as used, although it may be another rank's
                if (own := name.removeprefix(_NAMESPACE)) in names and own in self.parameters:
                    self.optimizer.state[self.parameters[own]] = unflatten(stored)

    def numbers_to_average(self, names: Sequence[str]) -> list[Array]:
        of_each = [self.optimizer.state.get(self.parameters.get(name), {}) for name in names]
        return [
            value.detach().reshape(-1).numpy()
            for state in of_each
            for value in state.values()
            if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64) and value.is_contiguous()
        ]


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
