"""Broadcast of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import world
from ..process_sets import ProcessSet, global_process_set
from ..request import Handle, Request
from .allreduce import reduced_copies
from .submission import Average, detached_copies, in_place, on_host, submit, synchronize


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Copy a tensor from a rank to all ranks, in place.

    Args:
        root_rank: The sender's rank among all ranks, also for a process set.
    """
    hosts = on_host([tensor], "broadcast")
    if root_rank not in (process_set.ranks or ()):
        raise ValueError(f"broadcast: rank {root_rank} is not one of the ranks {process_set.ranks}")
    root = (process_set.ranks or []).index(root_rank)
    request = Request("broadcast", name or "", tensor.dtype, (tuple(tensor.shape),), None, root)
    return submit(Handle(request, hosts, in_place([tensor], is_group=False)), process_set)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Copy a tensor from a rank to all ranks; the input does not change."""
    (output,) = detached_copies([tensor], "broadcast")
    return broadcast_async_(output, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Copy a tensor from a rank to all ranks, in place, and return it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of a rank. On that rank the gradient is the average of the ranks' gradients, elsewhere 0."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-any-return]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        reduced = reduced_copies([grad], Average, None, (1.0, 1.0), ctx.process_set)[0]
        is_root = world.current().rank == ctx.root_rank
        return (reduced if is_root else torch.zeros_like(reduced)), None, None, None
