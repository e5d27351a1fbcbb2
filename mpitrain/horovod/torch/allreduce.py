"""Allreduce of dense tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..execution import reduction_for
from ..process_sets import ProcessSet, global_process_set
from ..request import Handle, ReduceOp, Request
from .compression import Compression, Compressor, compress
from .submission import (
    Adasum,
    Average,
    Sum,
    check_tensors,
    detached_copies,
    in_place,
    on_host,
    submit,
    synchronize,
    to_reduce_op,
)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce a tensor over all ranks, in place.

    Args:
        average: Deprecated; use ``op``.
        name: Name of the operation, equal on all ranks; operations without a name are numbered.
        op: The reduction; Average if None.
        prescale_factor, postscale_factor: Factors before and after the reduction.
    """
    scales = (prescale_factor, postscale_factor)
    return _allreduce(
        [tensor], to_reduce_op(op, average), name, scales, process_set, in_place([tensor], is_group=False)
    )


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce a tensor over all ranks. The input does not change, and the caller may change it immediately."""
    (output,) = detached_copies([tensor], "allreduce")
    return allreduce_async_(output, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce tensors of one type over all ranks, in place, as one operation."""
    scales = (prescale_factor, postscale_factor)
    return _allreduce(tensors, to_reduce_op(op, average), name, scales, process_set, in_place(tensors, is_group=True))


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce tensors of one type over all ranks, as one operation."""
    outputs = detached_copies(tensors, "allreduce")
    return grouped_allreduce_async_(outputs, average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Reduce a tensor over all ranks, in place, and return it. Takes the arguments of ``allreduce_async_``."""
    return synchronize(allreduce_async_(tensor, *args, **kwargs))  # type: ignore[no-any-return]


def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """Reduce tensors in place, and return them. Takes the arguments of ``grouped_allreduce_async_``."""
    return synchronize(grouped_allreduce_async_(tensors, *args, **kwargs))  # type: ignore[no-any-return]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the reduction of a tensor over all ranks; for Sum, Average and Adasum, gradients are reduced likewise."""
    group = [tensor]
    scales = (prescale_factor, postscale_factor)
    return _grouped_allreduce(group, to_reduce_op(op, average), name, compression, scales, process_set)[0]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the reductions of tensors of one type, as one operation; see ``allreduce`` for their gradients."""
    scales = (prescale_factor, postscale_factor)
    return _grouped_allreduce(tensors, to_reduce_op(op, average), name, compression, scales, process_set)


def _allreduce(
    tensors: Sequence[Tensor],
    op: ReduceOp,
    name: str | None,
    scales: tuple[float, float],
    process_set: ProcessSet,
    finish: Callable[[Any], Any],
) -> Handle:
    hosts = on_host(tensors, "allreduce")
    dtype = hosts[0].dtype
    if op == Adasum:
        _check_adasum(dtype, process_set)
    else:
        reduction_for(op, dtype)  # raises ValueError
    shapes = tuple([tuple(tensor.shape) for tensor in tensors])
    request = Request("allreduce", name or "", dtype, shapes, op, None, scales)
    return submit(Handle(request, hosts, finish), process_set)


def _check_adasum(dtype: torch.dtype, process_set: ProcessSet) -> None:
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum works on all ranks only; use Average or Sum with a process set")
    if not dtype.is_floating_point:
        raise ValueError(f"Adasum needs floating-point tensors, not {dtype}")


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: ReduceOp, name: str | None, scales: tuple[float, float], process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.op, ctx.scales, ctx.process_set = op, scales, process_set
        return reduced_copies(tensors, op, name, scales, process_set)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.op not in (Average, Sum, Adasum):
            raise NotImplementedError(f"allreduce with {ctx.op.name} has no gradient; use Sum or Average")
        return (None, None, None, None, *reduced_copies(grads, ctx.op, None, ctx.scales, ctx.process_set))


def reduced_copies(
    tensors: Sequence[Tensor], op: ReduceOp, name: str | None, scales: tuple[float, float], process_set: ProcessSet
) -> tuple[Tensor, ...]:
    """Return reduced copies of tensors, as one operation."""
    outputs = detached_copies(tensors, "allreduce")
    return tuple(synchronize(_allreduce(outputs, op, name, scales, process_set, in_place(outputs, is_group=True))))


def _grouped_allreduce(
    tensors: Sequence[Tensor],
    op: ReduceOp,
    name: str | None,
    compression: type[Compressor],
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> list[Tensor]:
    check_tensors(tensors, "allreduce")
    compressed, contexts = compress(compression, tensors)
    reduced = _Allreduce.apply(op, name, scales, process_set, *compressed)
    return [compression.decompress(one, context) for one, context in zip(reduced, contexts, strict=True)]
