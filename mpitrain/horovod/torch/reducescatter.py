"""Reducescatter of tensors along their first dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..execution import reduction_for
from ..process_sets import ProcessSet, global_process_set
from ..request import Handle, ReduceOp, Request
from .allgather import grouped_allgather_async
from .compression import Compression, Compressor, compress
from .submission import Adasum, Average, Sum, check_tensors, rows_on_host, submit, synchronize


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Reduce tensors over all ranks, as one operation; each rank gets its share of the rows of each tensor."""
    scales = (prescale_factor, postscale_factor)
    return _reducescatter(tensors, name, ReduceOp(op), process_set, scales, list)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Reduce a tensor over all ranks; each rank gets equally many rows, or the first ranks one more than the others."""
    scales = (prescale_factor, postscale_factor)
    return _reducescatter([tensor], name, ReduceOp(op), process_set, scales, lambda outputs: outputs[0])


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the reduction over all ranks; see ``reducescatter_async``."""
    scales = (prescale_factor, postscale_factor)
    return _grouped_reducescatter([tensor], name, compression, ReduceOp(op), process_set, scales)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's rows of the reductions of tensors, as one operation; see ``reducescatter_async``."""
    scales = (prescale_factor, postscale_factor)
    return _grouped_reducescatter(tensors, name, compression, ReduceOp(op), process_set, scales)


def _reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    scales: tuple[float, float],
    select: Callable[[list[Tensor]], Any],
) -> Handle:
    hosts, device = rows_on_host(tensors, "reducescatter"), tensors[0].device
    if op == Adasum:
        raise NotImplementedError("reducescatter does not support Adasum; use Average or Sum")
    reduction_for(op, hosts[0].dtype)  # raises ValueError
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    request = Request("reducescatter", name or "", hosts[0].dtype, shapes, op, None, scales)
    finish = lambda outputs: select([output.to(device) for output in outputs])  # noqa: E731
    return submit(Handle(request, hosts, finish), process_set)


def _grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: type[Compressor],
    op: ReduceOp,
    process_set: ProcessSet,
    scales: tuple[float, float],
) -> list[Tensor]:
    check_tensors(tensors, "reducescatter")
    compressed, contexts = compress(compression, tensors)
    reduced = _Reducescatter.apply(name, op, process_set, scales, *compressed)
    return [compression.decompress(one, context) for one, context in zip(reduced, contexts, strict=True)]


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: ReduceOp, process_set: ProcessSet, scales: tuple[float, float], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.op, ctx.process_set, ctx.scales = op, process_set, scales
        handle = grouped_reducescatter_async(tensors, name, op, process_set, *scales)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.op not in (Average, Sum):
            raise NotImplementedError(f"reducescatter with {ctx.op.name} has no gradient; use Sum or Average")
        factor = ctx.scales[0] * ctx.scales[1] * (ctx.process_set.size() if ctx.op == Sum else 1)
        gathered = synchronize(grouped_allgather_async([grad * factor for grad in grads], None, ctx.process_set))
        return (None, None, None, None, *gathered)
