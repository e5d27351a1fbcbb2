"""The buffers of a PyTorch module: values that the workers average, and values that each worker keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core.extra_state import ExtraState, Versioned, values_of
from ..core.layout import ARRAY_GROUPS, Array
from .bfloat16 import to_array
from .names import plain_name

_KEPT, _TRANSIENT = ARRAY_GROUPS
_VERSION = 1  # version of these groups in checkpoints


class Buffers:
    """The buffers of a module, each once. Make it before training: the values determine their treatment.

    Averaged are buffers of finite floating-point numbers that ``state_dict`` contains, such as running statistics. They
    are part of the flat vectors; each worker's changes are averaged. Each worker keeps its own values of all other
    buffers; checkpoints contain the chief's.

    Attributes:
        averaged: The averaged buffers, by the names of ``state_dict``.
    """

    def __init__(self, model: nn.Module) -> None:
        averaged, kept, group_of = dict[str, Tensor](), dict[str, Tensor](), {}
        persistent = model.state_dict(keep_vars=True)
        for name, tensor in model.named_buffers():
            # Changes of infinite values, as in attention masks, cannot be averaged.
            if tensor.is_floating_point() and name in persistent and bool(tensor.isfinite().all()):
                averaged[plain_name(name)] = tensor
            else:
                kept[plain_name(name)] = tensor
                group_of[plain_name(name)] = _KEPT if name in persistent else _TRANSIENT
        self.averaged, self._group_of = averaged, group_of
        self._averaged_in, self._kept_in = owners_of(model, averaged), owners_of(model, kept)
        self._initial = {name: (buffer, buffer._version) for name, buffer in kept.items()}
        self._values: list[Tensor] = []  # of the averaged buffers, in the bound parameters
        self._increments: list[Tensor] = []  # their changes, in the bound gradient

    def bind(self, values: Mapping[str, Tensor], increments: Mapping[str, Tensor]) -> None:
        """Keep the averaged buffers in ``values``, and their changes in ``increments``, by name, from now on."""
        self._values = [values[name] for name in self.averaged]
        self._increments = [increments[name] for name in self.averaged]

    def load(self) -> None:
        """Set the averaged buffers to the bound values. The module has copies: workers share the vectors."""
        if self._values:
            with torch.no_grad():
                torch._foreach_copy_([owner[key] for owner, key in self._averaged_in], self._values)

    def store_increments(self, share: float) -> None:
        """Write how the forward pass has changed the averaged buffers, weighted by this worker's share."""
        if not self._values:
            return
        with torch.no_grad():
            for (owner, key), before, increment in zip(self._averaged_in, self._values, self._increments, strict=True):
                torch.sub(owner[key], before, out=increment).mul_(share)

    def extra_state(self) -> ExtraState:
        """Return the buffers that this worker keeps; those that ``state_dict`` omits only if they have changed."""
        groups: dict[str, dict[str, Array]] = {}
        for (name, (initial, version)), (owner, key) in zip(self._initial.items(), self._kept_in, strict=True):
            buffer, group = owner.get(key), self._group_of[name]
            is_initial = group == _TRANSIENT and buffer is initial and buffer._version == version
            if buffer is not None and buffer.numel() and not is_initial:
                groups.setdefault(group, {})[name] = to_array(buffer).copy()
        return {group: Versioned(_VERSION, values) for group, values in groups.items()}

    def load_extra_state(self, state: ExtraState) -> None:
        """Set the buffers that ``state`` contains."""
        groups = {group: values_of(state, group, _VERSION) for group in ARRAY_GROUPS}
        for (name, group), (owner, key) in zip(self._group_of.items(), self._kept_in, strict=True):
            stored = groups[group].get(name)
            if stored is None:
                continue
            value, buffer = torch.from_numpy(np.array(stored)), owner[key]
            if value.numel() == buffer.numel():
                buffer.copy_(value.reshape(buffer.shape))
            else:  # the forward pass had replaced the tensor by a tensor of another size
                owner[key] = value.to(buffer.device, buffer.dtype)


def owners_of(model: nn.Module, names: Iterable[str]) -> list[tuple[dict[str, Any], str]]:
    """Return for each buffer the dict that holds it, and its key: a forward pass may replace the tensor."""
    # A compiled module is followed by the module that it wraps, which has the same name and owns the buffers.
    modules = {plain_name(path): module for path, module in model.named_modules()}
    return [(modules[path]._buffers, key) for path, _, key in (name.rpartition(".") for name in names)]
