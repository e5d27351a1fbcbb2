"""The operations on tensors.

The functions that end in ``async`` or ``async_`` return a handle, except ``sparse_allreduce_async``, which returns a
function. The other functions wait for the result, and can be differentiated if they do not work in place. Functions
that end in an underscore work in place.

An operation starts when all ranks of its process set have submitted it under the same name, in any order. Operations
without a name are numbered, so the ranks must submit them in the same order. ``Request`` lists the properties that must
be equal on all ranks. Submitting is local; waiting needs the other ranks.

All functions may raise:
    ValueError: An argument is not valid, an operation of the same name is pending, or ``init`` has not been called.
    HorovodInternalError: While waiting: the ranks have submitted different operations, or a rank has shut down.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import world
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
    rows_on_host,
    submit,
    synchronize,
    to_reduce_op,
)

__all__ = """
    allgather allgather_async allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async broadcast
    broadcast_ broadcast_async broadcast_async_ grouped_allgather grouped_allgather_async grouped_allreduce
    grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
    grouped_reducescatter_async reducescatter reducescatter_async sparse_allreduce_async
""".split()

F = TypeVar("F", bound=Callable[..., Any])


def _arguments_of(model: Callable[..., Any]) -> Callable[[F], F]:
    """Show the parameters of ``model``, except its first one, for a function that passes its other arguments to it."""

    def decorate(function: F) -> F:
        own, signature = inspect.signature(function), inspect.signature(model)
        parameters = [*own.parameters.values()][:1] + [*signature.parameters.values()][1:]
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


def _only(handle: Handle) -> Handle:
    """Let the result of an operation on one tensor be a tensor instead of a list."""
    finish = handle.finish
    assert finish is not None
    handle.finish = lambda outputs: finish(outputs)[0]
    return handle


class _WithGradient(torch.autograd.Function):
    """Results of an operation, and a function that computes the gradients of its tensors from those of the results."""

    @staticmethod
    def forward(ctx: Any, results: Sequence[Tensor], gradient: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.gradient = gradient
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.gradient(grads))


def _differentiable(
    kind: str,
    tensors: Sequence[Tensor],
    operation: Callable[[Sequence[Tensor]], Handle],
    gradient: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    compression: type[Compressor] = Compression.none,
) -> list[Tensor]:
    """Perform an operation on compressed tensors, and return its decompressed results."""
    check_tensors(tensors, kind)
    compressed, contexts = compress(compression, tensors)
    results = _WithGradient.apply(synchronize(operation(compressed)), gradient, *compressed)
    return [compression.decompress(one, context) for one, context in zip(results, contexts, strict=True)]


# Allreduce.


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce tensors of one type over all ranks, in place, as one operation.

    Args:
        average: Deprecated; use ``op``.
        name: Name of the operation, equal on all ranks; operations without a name are numbered.
        op: The reduction; Average if None.
        prescale_factor, postscale_factor: Factors before and after the reduction.
    """
    reduction, hosts = to_reduce_op(op, average), on_host(tensors, "allreduce")
    dtype = hosts[0].dtype
    if reduction != Adasum:
        reduction_for(reduction, dtype)  # raises ValueError
    elif process_set is not global_process_set:
        raise NotImplementedError("Adasum works on all ranks only; use Average or Sum with a process set")
    elif not dtype.is_floating_point:
        raise ValueError(f"Adasum needs floating-point tensors, not {dtype}")
    shapes = tuple([tuple(tensor.shape) for tensor in tensors])
    request = Request("allreduce", name or "", dtype, shapes, reduction, None, (prescale_factor, postscale_factor))
    return submit(Handle(request, hosts, in_place(tensors)), process_set)


@_arguments_of(grouped_allreduce_async_)
def allreduce_async_(tensor: Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Reduce a tensor over all ranks, in place. Takes the arguments of ``grouped_allreduce_async_``."""
    return _only(grouped_allreduce_async_([tensor], *args, **kwargs))


@_arguments_of(grouped_allreduce_async_)
def grouped_allreduce_async(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Handle:
    """Reduce tensors as ``grouped_allreduce_async_``. The caller may change them immediately."""
    return grouped_allreduce_async_(detached_copies(tensors, "allreduce"), *args, **kwargs)


@_arguments_of(grouped_allreduce_async_)
def allreduce_async(tensor: Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Reduce a tensor over all ranks. The input does not change, and the caller may change it immediately."""
    return _only(grouped_allreduce_async([tensor], *args, **kwargs))


@_arguments_of(grouped_allreduce_async_)
def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """Reduce tensors in place, and return them. Takes the arguments of ``grouped_allreduce_async_``."""
    return synchronize(grouped_allreduce_async_(tensors, *args, **kwargs))  # type: ignore[no-any-return]


@_arguments_of(grouped_allreduce_async_)
def allreduce_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Reduce a tensor over all ranks, in place, and return it. Takes the arguments of ``allreduce_async_``."""
    return synchronize(allreduce_async_(tensor, *args, **kwargs))  # type: ignore[no-any-return]


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
    """Return the reductions of tensors of one type, as one operation.

    For Sum, Average and Adasum, gradients are reduced likewise.
    """
    reduction = to_reduce_op(op, average)
    words = (reduction, prescale_factor, postscale_factor, process_set)

    def gradient(grads: Sequence[Tensor]) -> Any:
        if reduction not in (Average, Sum, Adasum):
            raise NotImplementedError(f"allreduce with {reduction.name} has no gradient; use Sum or Average")
        return synchronize(grouped_allreduce_async(grads, None, None, *words))

    def operation(compressed: Sequence[Tensor]) -> Handle:
        return grouped_allreduce_async(compressed, None, name, *words)

    return _differentiable("allreduce", tensors, operation, gradient, compression)


@_arguments_of(grouped_allreduce)
def allreduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the reduction of a tensor over all ranks; see ``grouped_allreduce`` for arguments and gradients."""
    return grouped_allreduce([tensor], *args, **kwargs)[0]


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: ReduceOp | int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Add sparse tensors (COO) of all ranks; return a function that waits and returns the sum or average.

    The ranks may have different elements, and different numbers of them.
    """
    if op not in (Average, Sum):
        raise ValueError(f"a sparse allreduce supports Sum and Average only, not {ReduceOp(op).name}")
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def result() -> Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False)

    return result


# Reducescatter.


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Reduce tensors over all ranks, as one operation; each rank gets its share of the rows of each tensor.

    Each rank gets equally many rows, or the first ranks one more than the others.
    """
    hosts, device, reduction = rows_on_host(tensors, "reducescatter"), tensors[0].device, ReduceOp(op)
    if reduction == Adasum:
        raise NotImplementedError("reducescatter does not support Adasum; use Average or Sum")
    dtype, shapes = hosts[0].dtype, tuple(tuple(tensor.shape) for tensor in tensors)
    reduction_for(reduction, dtype)  # raises ValueError
    request = Request("reducescatter", name or "", dtype, shapes, reduction, None, (prescale_factor, postscale_factor))
    return submit(Handle(request, hosts, lambda outputs: [output.to(device) for output in outputs]), process_set)


@_arguments_of(grouped_reducescatter_async)
def reducescatter_async(tensor: Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Reduce a tensor over all ranks; each rank gets its share of the rows. See ``grouped_reducescatter_async``."""
    return _only(grouped_reducescatter_async([tensor], *args, **kwargs))


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's rows of the reductions of tensors, as one operation; see ``grouped_reducescatter_async``."""

    def operation(compressed: Sequence[Tensor]) -> Handle:
        return grouped_reducescatter_async(compressed, name, op, process_set, prescale_factor, postscale_factor)

    def gradient(grads: Sequence[Tensor]) -> Any:
        if op not in (Average, Sum):
            raise NotImplementedError(f"reducescatter with {ReduceOp(op).name} has no gradient; use Sum or Average")
        factor = prescale_factor * postscale_factor * ((process_set.size() or 1) if op == Sum else 1)
        return synchronize(grouped_allgather_async([grad * factor for grad in grads], None, process_set))

    return _differentiable("reducescatter", tensors, operation, gradient, compression)


@_arguments_of(grouped_reducescatter)
def reducescatter(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return this rank's rows of the reduction over all ranks; see ``grouped_reducescatter``."""
    return grouped_reducescatter([tensor], *args, **kwargs)[0]


# Allgather.


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Join each tensor with the tensors of the other ranks along the first dimension, as one operation.

    The first dimensions may differ between ranks.
    """
    hosts, device = rows_on_host(tensors, "allgather"), tensors[0].device
    request = Request("allgather", name or "", hosts[0].dtype, tuple(tuple(tensor.shape[1:]) for tensor in tensors))
    return submit(Handle(request, hosts, lambda outputs: [output.to(device) for output in outputs]), process_set)


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Join the ranks' tensors along the first dimension, which may differ between ranks."""
    return _only(grouped_allgather_async([tensor], name, process_set))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return each tensor joined with the tensors of the other ranks, as one operation; see ``allgather``."""
    counts = [len(tensor) for tensor in tensors if isinstance(tensor, Tensor) and tensor.dim()]

    def gradient(grads: Sequence[Tensor]) -> list[Tensor]:
        reduced = synchronize(grouped_allreduce_async(grads, process_set=process_set))
        rows = synchronize(allgather_async(torch.tensor([counts], device="cpu"), None, process_set))
        starts = rows[: process_set.rank()].sum(0).tolist()
        return [grad.narrow(0, start, n) for grad, start, n in zip(reduced, starts, counts, strict=True)]

    operation = partial(grouped_allgather_async, name=name, process_set=process_set)
    return _differentiable("allgather", tensors, operation, gradient)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Return the ranks' tensors, joined along the first dimension, which may differ between ranks.

    The gradient is the average of the ranks' gradients of this rank's rows.
    """
    return grouped_allgather([tensor], name, process_set)[0]


# Broadcast.


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Copy a tensor from a rank to all ranks, in place.

    Args:
        root_rank: The sender's rank among all ranks, also for a process set.
    """
    hosts, ranks = on_host([tensor], "broadcast"), process_set.ranks or []
    if root_rank not in ranks:
        raise ValueError(f"broadcast: rank {root_rank} is not one of the ranks {process_set.ranks}")
    request = Request("broadcast", name or "", tensor.dtype, (tuple(tensor.shape),), None, ranks.index(root_rank))
    return _only(submit(Handle(request, hosts, in_place([tensor])), process_set))


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

    def gradient(grads: Sequence[Tensor]) -> Any:
        reduced = synchronize(grouped_allreduce_async(grads, process_set=process_set))
        return reduced if world.current().rank == root_rank else [torch.zeros_like(reduced[0])]

    result = synchronize(broadcast_async(tensor, root_rank, name, process_set))
    return _WithGradient.apply([result], gradient, tensor)[0]  # type: ignore[no-any-return]


# Alltoall.


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


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows that all ranks have sent to this rank; with ``splits`` also the number of rows from each rank.

    The backward pass sends the gradient of each row back to the rank that sent the row.
    """
    result, received = synchronize(alltoall_async(tensor, splits, name, process_set))
    rows = len(tensor)

    def gradient(grads: Sequence[Tensor]) -> list[Tensor]:
        returned, _ = synchronize(alltoall_async(grads[0], received, None, process_set))
        unsent = returned.new_zeros((rows - len(returned), *returned.shape[1:]))
        return [torch.cat([returned, unsent]) if len(unsent) else returned]

    (output,) = _WithGradient.apply([result], gradient, tensor)
    return output if splits is None else (output, received)
