"""Gradients that detect when a script uses them: the averages of all workers are then copied to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_PROPERTIES = (
    "device",
    "dtype",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_sparse",
    "layout",
    "ndim",
    "requires_grad",
    "shape",
)
# Operations and attributes that do not depend on the values.
_NOT_A_USE = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(Tensor.size, Tensor.numel, Tensor.dim, Tensor.stride, Tensor.requires_grad_, Tensor.detach_, Tensor.__len__),
}

OnUse = Callable[[], None]


class WatchedGradient(Tensor):
    """A view of the flat gradient that calls ``on_use`` before an operation of torch reads or changes it.

    Autograd adds to the gradient without a call. The results of operations are ordinary tensors.
    """

    on_use: OnUse

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _NOT_A_USE:
            used = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, WatchedGradient)), None)
            if used is not None:
                used.on_use()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def watched(gradient: Tensor, on_use: OnUse) -> WatchedGradient:
    """Return the gradient as a tensor that shares its memory, and calls ``on_use``."""
    made = gradient.as_subclass(WatchedGradient)
    made.on_use = on_use
    return made
