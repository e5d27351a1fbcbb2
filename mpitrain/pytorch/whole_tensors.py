"""An optimizer of torch that updates whole tensors: it runs itself, on the parameters of the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from ..core.extra_state import ExtraState, Versioned, values_of
from ..core.layout import Array
from ..errors import CheckpointError
from ..optim.whole_tensors import WholeTensorOptimizer
from .state_tree import flatten, unflatten
from .torch_rule import ELEMENTWISE

_DIVISIBLE = (torch.optim.Adafactor, torch.optim.Muon)
_NAMESPACE = "state of the optimizer "  # followed by its class, and ": " with the name of a parameter
_VERSION = 1
_AVERAGED = (torch.float32, torch.float64)
_NO_OPTIONS = ("params", "param_names")


@dataclass(frozen=True)
class TorchTensors(WholeTensorOptimizer):
    """Updates with any optimizer of torch: calls its ``step`` with only this rank's parameters.

    Checkpoints contain the optimizer's ``state`` and groups; state in its other attributes is not saved. The ranks
    divide the tensors of torch's optimizers that update tensors separately, and of classes with
    ``updates_tensors_separately = True``. Otherwise one rank updates all tensors.

    Attributes:
        optimizer: The optimizer, with the options that its groups have at each update.
        parameters: The parameters of the model that the optimizer has, by name.
        index: Its position among the optimizers of a script; None if there is only one.
        own: The names of the parameters that this rank updates; it keeps state only for these.
        changed: The options of groups that the optimizer itself has changed; other ranks may have other values.
    """

    optimizer: Any = field(default=None, kw_only=True)
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict, kw_only=True, repr=False)
    index: int | None = field(default=None, kw_only=True)
    own: set[str] = field(default_factory=set, kw_only=True, repr=False, compare=False)
    changed: set[str] = field(default_factory=set, kw_only=True, repr=False, compare=False)

    @property
    def name(self) -> str:
        kind = type(self.optimizer).__name__
        return kind if self.index is None else f"{kind} {self.index}"

    def stores(self, namespace: str) -> bool:
        """Return whether ``tensor_state`` has this namespace."""
        return namespace.startswith(f"{_NAMESPACE}{self.name}: ")

    def update_tensors(self, grads: Mapping[str, Array]) -> None:
        own = {name: gradient for name, gradient in grads.items() if name in self.parameters}
        gradients = {id(self.parameters[name]): from_dlpack(gradient) for name, gradient in own.items()}
        views = {name: self.parameters[name].data for name in own}
        with _restricted(self.optimizer, gradients) as has_parameters:
            if not has_parameters:
                return
            before = _options(self.optimizer)
            type(self.optimizer).step(self.optimizer)  # the instance's attribute ``step`` may be that of the Trainer
            for old, new in zip(before, _options(self.optimizer), strict=True):
                self.changed.update(name for name, value in new.items() if old.get(name) != value)
        for name, view in views.items():
            parameter = self.parameters[name]
            # The optimizer has replaced the data, as in ``p.data = p.data - d``.
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view

    def can_divide(self) -> bool:
        kind = type(self.optimizer)
        return kind in _DIVISIBLE or kind in ELEMENTWISE or bool(getattr(kind, "updates_tensors_separately", False))

    def tensor_state(self) -> ExtraState:
        prefix, text = f"{_NAMESPACE}{self.name}: ", f"the optimizer {self.name}"
        state = {prefix + name: Versioned(_VERSION, flatten(text, values)) for name, values in self.own_state().items()}
        shared = {key: value for key, value in self.optimizer.state.items() if not isinstance(key, Tensor)}
        groups = [
            {name: group[name] for name in self.changed if name in group} for group in self.optimizer.param_groups
        ]
        if not state or not (shared or self.changed):
            return state
        return state | {prefix: Versioned(_VERSION, flatten(text, {"state": shared, "groups": groups}))}

    def begin(self, names: Sequence[str], state: ExtraState) -> None:
        self.own.clear()
        self.own.update(name for name in names if name in self.parameters)
        self.keep_own_state()
        stored_names = [name for name in state if name.startswith(_NAMESPACE)]
        if stored_names:
            self.optimizer.state.clear()
        for stored_name in stored_names:
            kind, _, name = stored_name.removeprefix(_NAMESPACE).partition(": ")
            # This call marks the value as used, although the value may belong to another rank.
            values = values_of(state, stored_name, _VERSION)
            if kind != self.name:
                raise CheckpointError(
                    f"the checkpoint has the state of the optimizer {kind}, but the "
                    f"script uses {self.name}; pass --resume "
                    "never to start a new run",
                    on_all_ranks=True,
                )
            if not name:
                self._load_shared(unflatten(values))
            elif name in self.own:
                parameter = self.parameters[name]
                self.optimizer.state[parameter] = {
                    key: value.to(parameter.device) if isinstance(value, Tensor) and key != "step" else value
                    for key, value in unflatten(values).items()
                }

    def _load_shared(self, values: dict[str, Any]) -> None:
        """Restore state that belongs to no parameter."""
        self.optimizer.state.update(values["state"])
        for group, saved in zip(self.optimizer.param_groups, values["groups"], strict=False):
            group.update(saved)
            self.changed.update(saved)

    def keep_own_state(self) -> None:
        """Keep only the state of this rank's parameters, in tensors that no result of ``state_dict`` shares."""
        for name, parameter in self.parameters.items():
            if name not in self.own:
                self.optimizer.state.pop(parameter, None)
            elif parameter in self.optimizer.state:
                self.optimizer.state[parameter] = copy.deepcopy(self.optimizer.state[parameter])

    def own_state(self) -> dict[str, dict[str, Any]]:
        """Return the state of the parameters that this rank updates, by their names."""
        return {
            name: dict(self.optimizer.state[self.parameters[name]])
            for name in sorted(self.own)
            if self.parameters[name] in self.optimizer.state
        }

    def arrays_to_average(self) -> list[Array]:
        return [
            value.detach().reshape(-1).numpy()
            for state in self.own_state().values()
            for name, value in state.items()
            if name != "step" and isinstance(value, Tensor) and value.dtype in _AVERAGED and value.is_contiguous()
        ]


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [plain_options(group) for group in optimizer.param_groups]


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, of any class, that a checkpoint can store."""
    return {name: value for name, value in group.items() if name not in _NO_OPTIONS and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


@contextmanager
def _restricted(optimizer: torch.optim.Optimizer, gradients: Mapping[int, Tensor]) -> Iterator[bool]:
    """Restrict an optimizer to the parameters with these ids, and to these gradients; yield whether any remain."""
    groups = optimizer.param_groups
    all_params = [group["params"] for group in groups]
    own = [param for params in all_params for param in params if id(param) in gradients and param.requires_grad]
    own_ids = set(map(id, own))
    shown = [param.grad for param in own]
    try:
        for param in own:
            param.grad = gradients[id(param)]
        for group in groups:
            group["params"] = [param for param in group["params"] if id(param) in own_ids]
        optimizer.param_groups = [group for group in groups if group["params"]]
        yield bool(own)
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, all_params, strict=True):
            group["params"] = params
        for param, gradient in zip(own, shown, strict=True):
            param.grad = gradient
