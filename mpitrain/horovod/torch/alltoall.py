"""Exchange of the rows of tensors between all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..process_sets import ProcessSet, global_process_set
from ..request import Handle, Request
from .submission import rows_on_host, submit, synchronize


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Send rows of a tensor to all ranks; the result is the received rows, and the number of rows from each rank.

    Args:
        splits: The number of rows for each rank, int32; None for equal parts.
    """
    (host,) = rows_on_host([tensor], "alltoall")
    counts = _splits(tensor, splits, process_set.size() or 1)
    hosts = [host[: int(counts.sum())]]
    device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")
    request = Request("alltoall", name or "", tensor.dtype, (tuple(tensor.shape[1:]),))
    finish = lambda result: (result[0].to(tensor.device), result[1].to(device))  # noqa: E731
    return submit(Handle(request, hosts, finish, counts), process_set)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows that all ranks have sent to this rank; with ``splits`` also the number of rows from each rank.

    The backward pass sends the gradient of each row back to the rank that sent the row.
    """
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def _splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> Tensor:
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"alltoall: {rows} rows cannot be split equally among {size} ranks; pass splits")
        return torch.full((size,), rows // size, device="cpu")
    if not isinstance(splits, Tensor):
        splits = torch.tensor(splits, dtype=torch.int32, device="cpu")
    if splits.dtype != torch.int32 or splits.shape != (size,):
        raise ValueError(
            f"alltoall: splits must be int32 of shape ({size},), not {splits.dtype} of shape {tuple(splits.shape)}"
        )
    counts = splits.detach().cpu().long()
    if int(counts.min()) < 0 or int(counts.sum()) > rows:
        raise ValueError(f"alltoall: splits {counts.tolist()} must not be negative, nor more than {rows} rows in all")
    return counts


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        output, ctx.received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.rows = process_set, tensor.shape[0]
        ctx.mark_non_differentiable(ctx.received)
        return output, ctx.received

    @staticmethod
    def backward(ctx: Any, grad: Tensor, unused: Any) -> tuple[Any, ...]:  # type: ignore[override]
        returned, _ = synchronize(alltoall_async(grad, ctx.received, None, ctx.process_set))
        unsent = returned.new_zeros((ctx.rows - returned.shape[0], *returned.shape[1:]))
        return (torch.cat([returned, unsent]) if len(unsent) else returned), None, None, None
