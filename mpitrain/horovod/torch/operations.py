"""Submitting operations on tensors, and waiting for them.

The functions that end in ``async`` or ``async_`` return a handle. The others wait for it, and can be differentiated if
they do not work in place.

An operation starts when all ranks of its process set have submitted one with the same name, in any order. Operations
without a name are numbered, so the ranks must submit them in the same order. What must be equal on all ranks is in
``Request``. Submitting is local; waiting needs the other ranks.

Raises, all of them:
    ValueError: An argument is not valid, one with the same name is pending, or ``init`` has not been called.
    HorovodInternalError: The ranks have submitted different operations, or one has shut down; from waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...backend.host_tensors import copy_back, to_host
from .. import world
from ..execution import reduction_for
from ..process_sets import ProcessSet, global_process_set
from ..request import Handle, ReduceOp, Request
from .compression import Compression, Compressor

__all__ = """
    Adasum Average Max Min Product Sum
    allgather allgather_async grouped_allgather grouped_allgather_async
    allreduce allreduce_ allreduce_async allreduce_async_ sparse_allreduce_async
    grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_
    alltoall alltoall_async broadcast broadcast_ broadcast_async broadcast_async_
    reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async
    barrier join poll synchronize
""".split()

Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


# Waiting.


def poll(handle: Handle) -> bool:
    """Return whether an operation has ended. Local."""
    return world.current().engine.poll(handle) if not handle.done else True


def synchronize(handle: Handle) -> Any:
    """Wait for an operation, and return its result: a tensor, or a list of them for a group."""
    if not handle.done:
        world.current().engine.wait(handle)
    if handle.error is not None:
        raise handle.error
    if handle.finish is not None:
        finish, handle.finish = handle.finish, None
        handle.result = finish(handle.result)
    return handle.result


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks of a process set have called this."""
    synchronize(_submit(Handle(Request("barrier")), process_set))


def join(device: int = -1) -> int:
    """Return the last rank that joins, when all ranks have called this.

    Until then this rank takes part in the sums and averages of the others, with zeros. Other operations than allreduce
    fail on all ranks.

    Args:
        device: Not needed; tensors are copied from the device that they are on.
    """
    return int(synchronize(_submit(Handle(Request("join", "join")), global_process_set)))


# Allreduce.


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
        name: Equal on all ranks; None numbers the operation.
        op: Average if None.
        prescale_factor, postscale_factor: Factors before and after the reduction.
    """
    scales = (prescale_factor, postscale_factor)
    return _allreduce([tensor], _op(op, average), name, scales, process_set, _in_place([tensor], is_group=False))


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce a tensor over all ranks; the input does not change, and may change at once."""
    output = tensor.detach().clone()
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
    return _allreduce(tensors, _op(op, average), name, scales, process_set, _in_place(tensors, is_group=True))


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
    outputs = [tensor.detach().clone() for tensor in tensors]
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
    """Return the reduction of a tensor over all ranks; its gradient is reduced in the same way."""
    group = [tensor]
    scales = (prescale_factor, postscale_factor)
    return _grouped_allreduce(group, _op(op, average), name, compression, scales, process_set)[0]


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
    """Return the reductions of tensors of one type, as one operation; their gradients are reduced in the same way."""
    scales = (prescale_factor, postscale_factor)
    return _grouped_allreduce(tensors, _op(op, average), name, compression, scales, process_set)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: ReduceOp | int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Add sparse tensors (COO) of all ranks; return a function that waits and returns the sum or average.

    The ranks may have different elements, and different numbers of them.
    """
    if op not in (Average, Sum):
        raise ValueError(f"a sparse allreduce has Sum and Average only, not {ReduceOp(op).name}")
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def result() -> Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False)

    return result


def _allreduce(
    tensors: Sequence[Tensor],
    op: ReduceOp,
    name: str | None,
    scales: tuple[float, float],
    process_set: ProcessSet,
    finish: Callable[[Any], Any],
) -> Handle:
    hosts = _on_host(tensors, "allreduce")
    dtype = hosts[0].dtype
    if op == Adasum:
        _check_adasum(dtype, process_set)
    else:
        reduction_for(op, dtype)  # raises ValueError
    shapes = tuple([tuple(tensor.shape) for tensor in tensors])
    request = Request("allreduce", name or "", dtype, shapes, op, None, scales)
    return _submit(Handle(request, hosts, finish), process_set)


def _check_adasum(dtype: torch.dtype, process_set: ProcessSet) -> None:
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum is for all ranks; a process set has Average and Sum")
    if not dtype.is_floating_point:
        raise ValueError(f"Adasum is for floating-point tensors, not {dtype}")


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: ReduceOp, name: str | None, scales: tuple[float, float], process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.op, ctx.scales, ctx.process_set = op, scales, process_set
        return _reduced(tensors, op, name, scales, process_set)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.op not in (Average, Sum, Adasum):
            raise NotImplementedError(f"allreduce with {ctx.op.name} has no gradient; use Sum or Average")
        return (None, None, None, None, *_reduced(grads, ctx.op, None, ctx.scales, ctx.process_set))


def _reduced(
    tensors: Sequence[Tensor], op: ReduceOp, name: str | None, scales: tuple[float, float], process_set: ProcessSet
) -> tuple[Tensor, ...]:
    outputs = [tensor.detach().clone() for tensor in tensors]
    return tuple(synchronize(_allreduce(outputs, op, name, scales, process_set, _in_place(outputs, is_group=True))))


def _grouped_allreduce(
    tensors: Sequence[Tensor],
    op: ReduceOp,
    name: str | None,
    compression: type[Compressor],
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> list[Tensor]:
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    reduced = _Allreduce.apply(op, name, scales, process_set, *compressed)
    return [compression.decompress(one, context) for one, context in zip(reduced, contexts, strict=True)]


# Allgather.


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Join each tensor with those of the other ranks along the first dimension, as one operation.

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
    """Return each tensor joined with those of the other ranks, as one operation; see ``allgather``."""
    return list(_Allgather.apply(name, process_set, *tensors))


def _allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, select: Callable[[list[Tensor]], Any]
) -> Handle:
    hosts, device = _rows_on_host(tensors, "allgather"), tensors[0].device
    shapes = tuple(tuple(tensor.shape[1:]) for tensor in tensors)
    handle = Handle(
        Request("allgather", name or "", hosts[0].dtype, shapes),
        hosts,
        lambda outputs: select([output.to(device) for output in outputs]),
    )
    return _submit(handle, process_set)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        reduced = _reduced(grads, Average, None, (1.0, 1.0), ctx.process_set)
        rows = synchronize(allgather_async(torch.tensor([ctx.rows]), None, ctx.process_set))
        starts = rows[: ctx.process_set.rank()].sum(0).tolist()
        own = [grad.narrow(0, start, n) for grad, start, n in zip(reduced, starts, ctx.rows, strict=True)]
        return (None, None, *own)


# Broadcast.


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Copy a tensor from a rank to all ranks, in place.

    Args:
        root_rank: Among all ranks, also for a process set.
    """
    hosts = _on_host([tensor], "broadcast")
    if root_rank not in (process_set.ranks or ()):
        raise ValueError(f"broadcast: rank {root_rank} is not one of the ranks {process_set.ranks}")
    root = (process_set.ranks or []).index(root_rank)
    request = Request("broadcast", name or "", tensor.dtype, (tuple(tensor.shape),), None, root)
    return _submit(Handle(request, hosts, _in_place([tensor], is_group=False)), process_set)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Copy a tensor from a rank to all ranks; the input does not change."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Copy a tensor from a rank to all ranks, in place, and return it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of a rank. The gradient on that rank is the average of the ranks' gradients; elsewhere 0."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-any-return]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        reduced = _reduced([grad], Average, None, (1.0, 1.0), ctx.process_set)[0]
        is_root = world.current().rank == ctx.root_rank
        return (reduced if is_root else torch.zeros_like(reduced)), None, None, None


# Alltoall.


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Send rows of a tensor to all ranks; the result is the received rows, and how many each rank has sent.

    Args:
        splits: The number of rows for each rank, int32; None for equal parts.
    """
    (host,) = _rows_on_host([tensor], "alltoall")
    counts = _splits(tensor, splits, process_set.size() or 1)
    hosts = [host[: int(counts.sum())]]
    device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")
    request = Request("alltoall", name or "", tensor.dtype, (tuple(tensor.shape[1:]),))
    finish = lambda result: (result[0].to(tensor.device), result[1].to(device))  # noqa: E731
    return _submit(Handle(request, hosts, finish, counts), process_set)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows that all ranks have sent to this one; with ``splits`` also how many each has sent.

    The gradient sends the rows back.
    """
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def _splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> Tensor:
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"alltoall: {rows} rows cannot be split equally among {size} ranks; pass splits")
        return torch.full((size,), rows // size)
    if not isinstance(splits, Tensor):
        splits = torch.tensor(splits, dtype=torch.int32)
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


# Reducescatter.


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Reduce tensors over all ranks, as one operation; each rank gets its share of the rows of each."""
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
    """Reduce a tensor over all ranks; each rank gets its share of the rows, the first ones one more if need be."""
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
    hosts, device = _rows_on_host(tensors, "reducescatter"), tensors[0].device
    if op == Adasum:
        raise NotImplementedError("reducescatter has no Adasum; use Average or Sum")
    reduction_for(op, hosts[0].dtype)  # raises ValueError
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    request = Request("reducescatter", name or "", hosts[0].dtype, shapes, op, None, scales)
    finish = lambda outputs: select([output.to(device) for output in outputs])  # noqa: E731
    return _submit(Handle(request, hosts, finish), process_set)


def _grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: type[Compressor],
    op: ReduceOp,
    process_set: ProcessSet,
    scales: tuple[float, float],
) -> list[Tensor]:
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
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


# What they share.


def _submit(handle: Handle, process_set: ProcessSet) -> Handle:
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} has not been added, or has been removed; call add_process_set")
    return world.current().channel(process_set.process_set_id).submit(handle)


def _on_host(tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
    """Return contiguous CPU tensors of shape (n,): the same memory if possible, copies otherwise."""
    if not tensors:
        raise ValueError(f"{kind} needs at least one tensor")
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        raise ValueError(f"{kind}: the tensors of a group must have one type, not {[t.dtype for t in tensors]}")
    return [to_host(tensor) for tensor in tensors]


def _rows_on_host(tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
    """As ``_on_host``, with the shapes of the tensors, which have at least one dimension."""
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(f"{kind} needs tensors with at least one dimension; use tensor.view(1)")
    return [host.view(tensor.shape) for host, tensor in zip(_on_host(tensors, kind), tensors, strict=True)]


def _in_place(tensors: Sequence[Tensor], is_group: bool) -> Callable[[Sequence[Tensor]], Any]:
    """Return a function that copies results to the tensors they belong to, if need be, and returns these."""

    def finish(hosts: Sequence[Tensor]) -> Any:
        for tensor, host in zip(tensors, hosts, strict=True):
            copy_back(tensor, host)
        return list(tensors) if is_group else tensors[0]

    return finish


def _op(op: ReduceOp | int | None, average: bool | None) -> ReduceOp:
    if average is None:
        return Average if op is None else ReduceOp(op)
    if op is not None:
        raise ValueError("average and op exclude each other; use op alone")
    return Average if average else Sum
