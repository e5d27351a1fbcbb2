"""Reductions of tensors in a fixed order, for all data types of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

Binary = Callable[..., Tensor]


@dataclass(frozen=True)
class Reduction:
    """A reduction over ranks.

    Attributes:
        name: As in ``torch.distributed.ReduceOp``, in lower case.
        combine: Combines two tensors, with the keyword ``out``.
        is_mean: Whether the result is divided by the number of ranks.
    """

    name: str
    combine: Binary
    is_mean: bool = False

    @property
    def is_sum(self) -> bool:
        """Whether the ranks' tensors are added."""
        return self.name in ("sum", "avg")

    def __call__(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Set ``out`` to ((parts[0] + parts[1]) + parts[2]) + ..., in this order. Local.

        Args:
            parts: Tensors with the shape and dtype of ``out``, which may be one of the first two, but must not overlap
                the others.
        """
        if len(parts) == 1:
            out.copy_(parts[0])
            return
        self.combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            self.combine(out, part, out=out)

    def finish(self, out: Tensor, size: int) -> None:
        """If the result is a mean, divide the sum by ``size``, the number of ranks; truncate integers. Local."""
        if not self.is_mean:
            return
        if out.is_floating_point() or out.is_complex():
            out.div_(size)
        elif out.dtype in _BY_NUMPY:
            out.numpy()[...] //= size
        else:
            out.div_(size, rounding_mode="trunc")


# Types for which NumPy has arithmetic on CPUs, but PyTorch has none.
_BY_NUMPY = {getattr(torch, name) for name in ("uint16", "uint32", "uint64")}
_NUMPY = {
    torch.add: np.add,
    torch.mul: np.multiply,
    torch.minimum: np.minimum,
    torch.maximum: np.maximum,
    torch.bitwise_and: np.bitwise_and,
    torch.bitwise_or: np.bitwise_or,
    torch.bitwise_xor: np.bitwise_xor,
}


def _by_numpy(combine: Binary) -> Binary:
    ufunc = _NUMPY[combine]

    def combined(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        ufunc(a.numpy(), b.numpy(), out=out.numpy())
        return out

    return combined


_REDUCTIONS: tuple[tuple[Any, Reduction], ...] = (
    (ReduceOp.SUM, Reduction("sum", torch.add)),
    (ReduceOp.AVG, Reduction("avg", torch.add, is_mean=True)),
    (ReduceOp.PRODUCT, Reduction("product", torch.mul)),
    (ReduceOp.MIN, Reduction("min", torch.minimum)),
    (ReduceOp.MAX, Reduction("max", torch.maximum)),
    (ReduceOp.BAND, Reduction("band", torch.bitwise_and)),
    (ReduceOp.BOR, Reduction("bor", torch.bitwise_or)),
    (ReduceOp.BXOR, Reduction("bxor", torch.bitwise_xor)),
)
_BY_KIND = {int(kind): reduction for kind, reduction in _REDUCTIONS}
_BY_KIND_NUMPY = {kind: replace(r, combine=_by_numpy(r.combine)) for kind, r in _BY_KIND.items()}


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction:
    """Return the reduction of a ``ReduceOp`` for a data type.

    Raises:
        ValueError: There is no such reduction, such as the minimum of complex numbers.
    """
    reductions = _BY_KIND_NUMPY if dtype in _BY_NUMPY else _BY_KIND
    kind = getattr(op, "op", op)  # a ReduceOp, or one of its values
    reduction = reductions.get(int(kind))
    if reduction is None:
        raise ValueError(
            f"the backend mpitrain has no reduction {op}; use SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR or BXOR"
        )
    if dtype.is_complex and reduction.name not in ("sum", "avg", "product"):
        raise ValueError(f"{reduction.name} of {dtype} is not defined; use SUM, AVG or PRODUCT for complex tensors")
    if dtype.is_floating_point and reduction.name in ("band", "bor", "bxor"):
        raise ValueError(f"{reduction.name} of {dtype} is not defined; use a tensor of integers or bool")
    return reduction
