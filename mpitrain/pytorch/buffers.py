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
    buffers; checkpoints contain the chief's. In a step with several forward passes, all of them begin with the same
    values of those if ``keeps_first``, and the values after the first pass are kept: the chief's then do not depend on
    the number of passes that it makes.

    Attributes:
        averaged: The averaged buffers, by the names of ``state_dict``.
    """

    def __init__(self, model: nn.Module, keeps_first: bool = False) -> None:
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
        self._keeps_first, self._passes = keeps_first, 0  # number of forward passes of this step
        self._before: dict[int, Tensor] = {}  # values before and after the first pass, by index in ``_kept_in``
        self._after: dict[int, Tensor] = {}
        self._changing: set[int] | None = None  # the indices of those that change; None before this is known
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

    def end_step(self) -> None:
        """Set the buffers as the next step finds them: to those of all workers, and those after the first pass."""
        self.begin_step()
        self.load()

    def begin_step(self) -> None:
        """Begin a step, which may have several forward passes."""
        if self._keeps_first and self._passes == 1:
            self._end_first_pass()
        elif self._keeps_first and self._passes > 1:
            self._restore(self._after)
        self._passes = 0

    def begin_forward(self) -> None:
        """Prepare the buffers for a forward pass of a step."""
        if self._keeps_first:
            if self._passes == 0:
                self._before = self._copies()
            elif self._passes == 1:
                self._end_first_pass()
            if self._passes:
                self._restore(self._before)
            self._passes += 1
        self.load()

    def _end_first_pass(self) -> None:
        if self._changing is None:
            self._changing = {index for index, value in self._before.items() if self._differs(index, value)}
        self._after = self._copies()

    def _copies(self) -> dict[int, Tensor]:
        indices = range(len(self._kept_in)) if self._changing is None else self._changing
        return {index: buffer.clone() for index in indices if (buffer := self._kept(index)) is not None}

    def _kept(self, index: int) -> Tensor | None:
        owner, key = self._kept_in[index]
        return owner.get(key)

    def _differs(self, index: int, value: Tensor) -> bool:
        buffer = self._kept(index)
        return buffer is None or not torch.equal(buffer, value)

    def _restore(self, values: Mapping[int, Tensor]) -> None:
        for index, value in values.items():
            if self._differs(index, value):
                owner, key = self._kept_in[index]
                owner[key] = value.clone()

    def store_increments(self, share: float) -> None:
        """Write how the forward pass has changed the averaged buffers, weighted by this worker's share."""
        if not self._values:
            return
        with torch.no_grad():
            for (owner, key), before, increment in zip(self._averaged_in, self._values, self._increments, strict=True):
                torch.sub(owner[key], before, out=increment).mul_(share)

    def extra_state(self) -> ExtraState:
        """Return the buffers that this worker keeps; those that ``state_dict`` omits only if they have changed."""
        self.begin_step()  # with the values after the first pass
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
