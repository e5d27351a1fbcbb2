"""Parameters of a module in bfloat16: rounded copies of their float32 values in the flat vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.layout import Array
from ..data.trees import map_children


def to_array(tensor: Tensor) -> Array:
    """Return a tensor's values in host memory, perhaps shared; bfloat16 becomes float32, because NumPy lacks it."""
    host = tensor.detach().cpu()
    values: Array = (host.float() if host.dtype == torch.bfloat16 else host).numpy()
    return values


def to_bfloat16(tree: Any) -> Any:
    """Return a tree of tensors with its floating-point tensors in bfloat16."""
    if isinstance(tree, Tensor):
        return tree.bfloat16() if tree.is_floating_point() else tree
    return map_children(to_bfloat16, tree)


class Bfloat16Copies:
    """The bfloat16 parameters of a module, rounded from their values in the flat vector.

    Args:
        names, params: The parameters of the module; those of other types are ignored.
    """

    def __init__(self, names: Sequence[str], params: Sequence[nn.Parameter]) -> None:
        of_copies = [(name, param) for name, param in zip(names, params, strict=True) if is_copied(param)]
        self.names, self._params = [name for name, _ in of_copies], [param for _, param in of_copies]
        self._recorded = torch.empty(0)

    def bind(self, values: Mapping[str, Tensor]) -> None:
        """Set the parameters to bfloat16 copies of these values, by name."""
        self._values = [values[name] for name in self.names]
        self._copies = [value.to(torch.bfloat16) for value in self._values]
        for param, copy in zip(self._params, self._copies, strict=True):
            param.data = copy
        self._first = [copy.view(-1)[:1] for copy in self._copies if copy.numel()]

    def load(self) -> None:
        """Copy the values to the parameters. Autograd does not record the copy."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._values)

    def store_params(self) -> None:
        """Copy each element of the parameters that differs from its rounded value to the values."""
        for copy, value in zip(self._copies, self._values, strict=True):
            torch.where(copy == value.to(torch.bfloat16), value, copy.float(), out=value)

    def record(self) -> None:
        """Record one element of each parameter."""
        if self._first:
            self._recorded = torch.cat(self._first).view(torch.int16)

    def changed(self) -> str | None:
        """Return the name of a parameter whose recorded element has changed; None if no element has changed."""
        if not self._first or torch.equal(now := torch.cat(self._first).view(torch.int16), self._recorded):
            return None
        return [name for name, copy in zip(self.names, self._copies, strict=True) if copy.numel()][
            int((now != self._recorded).nonzero()[0])
        ]


def is_copied(param: Tensor) -> bool:
    """Return whether a parameter is a copy, in bfloat16, of its values in the flat vector."""
    return param.dtype == torch.bfloat16
