"""Convert the state of a torch optimizer, as in ``state_dict``, to slots and back: vectors in the model's layout."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core.layout import Array, Layout
from ..errors import JobError
from ..optim import Optimizer
from .bfloat16 import to_array
from .names import parameters_of
from .torch_rule import TorchRule

# Torch's names of the state that compiled rules have in slots.
_NAMES = {"mean": "exp_avg", "square": "exp_avg_sq", "velocity": "momentum_buffer"}


def has_taken_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has taken a step; Adagrad creates its state, with step 0, in its constructor."""
    return any(not isinstance(state, dict) or float(state.get("step", 1)) > 0 for state in optimizer.state.values())


def state_digest(optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of an optimizer's state, in the order of its parameters; empty if it has not taken a step."""
    if not has_taken_steps(optimizer):
        return ""
    digest = hashlib.sha256()
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            digest.update(key.encode())
            if isinstance(value, Tensor):
                digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            else:
                digest.update(repr(value).encode())
    return digest.hexdigest()


def set_state(
    optimizer: torch.optim.Optimizer,
    rule: Optimizer,
    model: nn.Module,
    layout: Layout,
    vectors: Mapping[str, Array],
    updates: int,
) -> None:
    """Set the optimizer's state to copies of the slots.

    Args:
        rule: The result of ``translated`` for the optimizer.
        vectors: The slots by name, shape (layout.size,) each.
        updates: The number of updates since training began.
    """
    if not updates:
        return
    views = {slot: layout.views(vector) for slot, vector in vectors.items()}
    for name, parameter in _optimized(optimizer, model):
        state: dict[str, Any] = {}
        if not isinstance(optimizer, torch.optim.SGD):
            state["step"] = torch.tensor(float(updates), device="cpu")
        for slot, (key, is_number) in _keys(rule, name).items():
            values = views[slot][name]
            state[key] = (
                torch.tensor(float(values.reshape(-1)[0]), device="cpu")
                if is_number
                else torch.from_numpy(values.copy())
            )
        optimizer.state[parameter] = state


def slots_of(
    optimizer: torch.optim.Optimizer, rule: Optimizer, model: nn.Module, layout: Layout, dtype: Any
) -> tuple[dict[str, Array], int]:
    """Return the optimizer's state as slots, shape (layout.size,), by name, and the number of the optimizer's updates.

    Raises:
        JobError: The state is of an optimizer with other options, or its parameters have different numbers of steps.
    """
    slots = {slot: np.zeros(layout.size, dtype) for slot in rule.slots}
    views, updates = {slot: layout.views(vector) for slot, vector in slots.items()}, set[int]()
    for name, parameter in _optimized(optimizer, model):
        state = optimizer.state.get(parameter)
        if not state:
            if parameter.requires_grad and not isinstance(optimizer, torch.optim.SGD):
                updates.add(0)
            continue
        updates.add(int(state.get("step", 1)))
        for slot, (key, is_number) in _keys(rule, name).items():
            value = state.get(key)
            if not isinstance(value, Tensor) or not (is_number or value.shape == parameter.shape):
                raise JobError(
                    f"the state of {type(optimizer).__name__} that was loaded has no {key} of the shape of {name}: it "
                    "must be of the same optimizer, with the same options and parameters"
                )
            views[slot][name][...] = float(value) if is_number else to_array(value)
    if len(updates) > 1:
        raise JobError(
            f"the state of {type(optimizer).__name__} that was loaded has parameters with different numbers of steps, "
            f"{', '.join(map(str, sorted(updates)))}: they must be the same"
        )
    return slots, updates.pop() if updates else 0


def _optimized(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that the optimizer has, by their names in the model."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [(name, parameter) for name, parameter in parameters_of(model) if id(parameter) in own]


def _keys(rule: Optimizer, name: str) -> dict[str, tuple[str, bool]]:
    """Return for each slot of a parameter the key of its state in torch, and whether it is a number."""
    of_parameter = rule.by_name(name)
    if isinstance(of_parameter, TorchRule):
        return {name: (name, name in of_parameter.numbers) for name in (*of_parameter.vectors, *of_parameter.numbers)}
    if getattr(of_parameter, "momentum", None) == 0:
        return {}
    return {slot: (_NAMES[slot], False) for slot in of_parameter.slots}
