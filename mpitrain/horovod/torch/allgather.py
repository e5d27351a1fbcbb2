"""Allgather of tensors along their first dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..process_sets import ProcessSet, global_process_set
from ..request import Handle, Request
from .allreduce import reduced_copies
from .submission import Average, rows_on_host, submit, synchronize


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Join each tensor with the tensors of the other ranks along the first dimension, as one operation.

    The first dimensions may differ between ranks.
    """
    return _allgather(tensors, name, process_set, list)


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Join the ranks' tensors along the first dimension, which may differ between ranks."""
    return _allgather([tensor], name, process_set, lambda outputs: outputs[0])


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Return the ranks' tensors, joined along the first dimension, which may differ between ranks.

    The gradient is the average of the ranks' gradients of this rank's rows.
    """
    return _Allgather.apply(name, process_set, tensor)[0]  # type: ignore[no-any-return]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return each tensor joined with the tensors of the other ranks, as one operation; see ``allgather``."""
    return list(_Allgather.apply(name, process_set, *tensors))


def _allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, select: Callable[[list[Tensor]], Any]
) -> Handle:
    hosts, device = rows_on_host(tensors, "allgather"), tensors[0].device
    shapes = tuple(tuple(tensor.shape[1:]) for tensor in tensors)
    handle = Handle(
        Request("allgather", name or "", hosts[0].dtype, shapes),
        hosts,
        lambda outputs: select([output.to(device) for output in outputs]),
    )
    return submit(handle, process_set)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = synchronize(grouped_allgather_async(tensors, name, process_set))
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        reduced = reduced_copies(grads, Average, None, (1.0, 1.0), ctx.process_set)
        rows = synchronize(allgather_async(torch.tensor([ctx.rows], device="cpu"), None, ctx.process_set))
        starts = rows[: ctx.process_set.rank()].sum(0).tolist()
        own = [grad.narrow(0, start, n) for grad, start, n in zip(reduced, starts, ctx.rows, strict=True)]
        return (None, None, *own)
