"""Submitting operations on tensors to the engine, and waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...backend.host_tensors import copy_back, to_host
from .. import world
from ..process_sets import ProcessSet, global_process_set
from ..request import Handle, ReduceOp, Request

__all__ = "Adasum Average Max Min Product Sum barrier join poll synchronize".split()

Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


def poll(handle: Handle) -> bool:
    """Return whether an operation has ended. Local."""
    _check_handle(handle)
    return world.current().engine.poll(handle) if not handle.done else True


def synchronize(handle: Handle) -> Any:
    """Wait for an operation, and return its result: a tensor, or a list of them for a group."""
    _check_handle(handle)
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
    synchronize(submit(Handle(Request("barrier")), process_set))


def join(device: int = -1) -> int:
    """Return the last rank that joins, when all ranks have called this.

    Until then this rank takes part in the sums and averages of the other ranks with zeros, and in barriers. All other
    operations fail on all ranks.

    Args:
        device: Not needed; accepted because Horovod has it.
    """
    return int(synchronize(submit(Handle(Request("join", "join")), global_process_set)))


def submit(handle: Handle, process_set: ProcessSet) -> Handle:
    """Submit an operation to a process set, and return its handle. Local."""
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} has not been added, or has been removed; call add_process_set")
    return world.current().channel(process_set.process_set_id).submissions.add(handle)


def _check_handle(handle: Handle) -> None:
    if not isinstance(handle, Handle):
        raise ValueError(f"a handle returned by an operation such as allreduce_async is needed, not {handle!r}")


def check_tensors(tensors: Sequence[Tensor], kind: str) -> None:
    """Check the tensors of an operation.

    Raises:
        ValueError: There are no tensors, or they are not dense tensors of one type.
    """
    if not tensors:
        raise ValueError(f"{kind} needs at least one tensor")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{kind} takes tensors, not {type(tensor).__name__}; use torch.as_tensor(value)")
        if tensor.layout != torch.strided:
            raise ValueError(f"{kind} takes dense tensors; use sparse_allreduce_async, or tensor.to_dense()")
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        raise ValueError(f"{kind}: the tensors of a group must have one type, not {[t.dtype for t in tensors]}")


def detached_copies(tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
    """Return copies that have no gradient."""
    check_tensors(tensors, kind)
    return [tensor.detach().clone() for tensor in tensors]


def on_host(tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
    """Return contiguous CPU tensors of shape (n,): the same memory if possible, copies otherwise."""
    check_tensors(tensors, kind)
    return [to_host(tensor) for tensor in tensors]


def rows_on_host(tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
    """Return the result of ``on_host`` in the shapes of the tensors, which must have at least one dimension."""
    hosts = on_host(tensors, kind)
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(f"{kind} needs tensors with at least one dimension; use tensor.view(1)")
    return [host.view(tensor.shape) for host, tensor in zip(hosts, tensors, strict=True)]


def in_place(tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return a function that copies results to ``tensors``, unless they share memory, and returns ``tensors``."""

    def finish(hosts: Sequence[Tensor]) -> list[Tensor]:
        for tensor, host in zip(tensors, hosts, strict=True):
            copy_back(tensor, host)
        return list(tensors)

    return finish


def to_reduce_op(op: ReduceOp | int | None, average: bool | None) -> ReduceOp:
    """Return the reduction that ``op`` or the deprecated ``average`` names; Average if both are None."""
    if average is None:
        return Average if op is None else ReduceOp(op)
    if op is not None:
        raise ValueError("average and op cannot be combined; use op alone")
    return Average if average else Sum
