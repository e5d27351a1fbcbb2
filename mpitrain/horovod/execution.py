"""Performs operations that all ranks have submitted, on the collectives of the backend."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..backend.collectives import Collectives, padded
from ..backend.internode import Steps
from ..backend.reductions import Reduction, reduction_of
from .adasum import combine
from .request import Handle, ReduceOp, Request

_OPS: dict[ReduceOp, Any] = {
    ReduceOp.Average: dist.ReduceOp.AVG,
    ReduceOp.Sum: dist.ReduceOp.SUM,
    ReduceOp.Min: dist.ReduceOp.MIN,
    ReduceOp.Max: dist.ReduceOp.MAX,
    ReduceOp.Product: dist.ReduceOp.PRODUCT,
}
Operation: TypeAlias = "tuple[Request, Handle | None]"  # None if this rank has joined


@functools.lru_cache
def reduction_for(op: ReduceOp, dtype: torch.dtype) -> Reduction:
    """Return the reduction of the backend.

    Raises:
        ValueError: The reduction is not defined for the data type.
    """
    return reduction_of(_OPS[op], dtype)


class Execution:
    """The operations of one process set.

    Args:
        collectives: The collectives of the set's ranks.
        rank, size: This rank's index in the set, and the number of its ranks.
        fusion_bytes: Maximum size in bytes of a buffer in which several tensors are fused.
        began: Called with the operations that are performed next.
        ended: Called with a handle and its result.
    """

    def __init__(
        self,
        collectives: Collectives,
        rank: int,
        size: int,
        fusion_bytes: int,
        began: Callable[[Sequence[Operation]], None],
        ended: Callable[[Handle, Any], None],
    ) -> None:
        self._collectives, self._rank, self._size = collectives, rank, size
        self._fusion_bytes, self._began, self._ended = fusion_bytes, began, ended
        self._kinds: dict[str, Callable[[Request, Handle], Steps]] = {
            "allgather": self._allgather,
            "alltoall": self._alltoall,
            "broadcast": self._broadcast,
            "reducescatter": self._reducescatter,
        }

    def stage(self, groups: Sequence[Sequence[Operation]]) -> bool:
        """Write the first block of the first group if it is an allreduce; return whether it has been written. Local.

        If other operations are performed instead, only this copy is wasted.
        """
        for (request, _), *_ in groups[:1]:
            if request.kind == "allreduce" and request.op != ReduceOp.Adasum and request.scales[0] == 1.0:
                return self._collectives.stage(next(_batches(_tensors(groups[0]), self._fusion_bytes)))
        return False

    def perform(self, groups: Sequence[Sequence[Operation]], is_staged: bool) -> Steps:
        """Perform operations. Collective over the set.

        Args:
            groups: The result of ``fused``; equal on all ranks, except for the handles.
            is_staged: Whether all ranks have written and published the first block.
        """
        for group in groups:
            self._began(group)
            request, handle = group[0]
            if request.kind == "allreduce":
                yield from self._allreduce(group, is_staged)
            elif request.kind in self._kinds:
                assert handle is not None
                yield from self._kinds[request.kind](request, handle)
            elif handle is not None:
                self._ended(handle, None)
            is_staged = False

    # Reductions.

    def _allreduce(self, group: Sequence[Operation], is_staged: bool) -> Steps:
        request, _ = group[0]
        assert request.op is not None and request.dtype is not None
        flats, (before, after) = _tensors(group), request.scales
        if request.op == ReduceOp.Adasum:
            for flat in flats:
                yield from self._adasum(flat)
        else:
            reduction = reduction_for(request.op, request.dtype)
            scale(flats, before)
            for part in _batches(flats, self._fusion_bytes):
                yield from self._collectives.all_reduce(part, reduction, is_staged)
                is_staged = False
            scale(flats, after)
        for _, handle in group:
            if handle is not None:
                self._ended(handle, handle.tensors)

    def _adasum(self, flat: Tensor) -> Steps:
        parts = [torch.empty_like(flat) for _ in range(self._size)]
        yield from self._collectives.all_gather(parts, [flat])
        flat.copy_(combine(parts))

    def _reducescatter(self, request: Request, handle: Handle) -> Steps:
        assert request.op is not None and request.dtype is not None
        reduction = reduction_for(request.op, request.dtype)
        outputs = []
        for tensor in handle.tensors:
            counts = _shares(tensor.shape[0], self._size)
            output = tensor.new_empty((counts[0], *tensor.shape[1:]))  # the first ranks have the largest shares
            if request.scales[0] != 1.0:
                tensor = tensor.clone()  # the input must not change
                scale([tensor], request.scales[0])
            parts = [padded(part, output) for part in tensor.split(counts)]
            yield from self._collectives.reduce_scatter([output.view(-1)], parts, reduction)
            scale([output], request.scales[1])
            outputs.append(output[: counts[self._rank]])
        self._ended(handle, outputs)

    # Copies.

    def _broadcast(self, request: Request, handle: Handle) -> Steps:
        assert request.root is not None
        for tensor in handle.tensors:
            yield from self._collectives.broadcast([tensor], request.root)
        self._ended(handle, handle.tensors)

    def _allgather(self, request: Request, handle: Handle) -> Steps:
        self._ended(handle, (yield from self._collectives.all_gather_rows(handle.tensors)))

    def _alltoall(self, request: Request, handle: Handle) -> Steps:
        assert handle.splits is not None
        splits = [torch.empty_like(handle.splits) for _ in range(self._size)]
        yield from self._collectives.all_gather(splits, [handle.splits])
        received = [int(row[self._rank]) for row in splits]
        (tensor,) = handle.tensors
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        yield from self._collectives.all_to_all(
            [part.reshape(-1) for part in output.split(received)],
            [part.reshape(-1) for part in tensor.split(handle.splits.tolist())],
            equal=False,
        )
        self._ended(handle, (output, torch.tensor(received, dtype=torch.int32, device="cpu")))


def fused(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Return the operations in groups that are performed together: allreduces of equal dtype, reduction and factors."""
    groups: dict[object, list[Operation]] = {}
    for index, (request, handle) in enumerate(operations):
        fused = request.kind == "allreduce"
        key = (request.dtype, request.op, request.scales) if fused else index
        groups.setdefault(key, []).append((request, handle))
    return [*groups.values()]


def _tensors(group: Sequence[Operation]) -> list[Tensor]:
    """Return the tensors of allreduces, each of shape (n,)."""
    return [tensor for request, handle in group for tensor in (_zeros(request) if handle is None else handle.tensors)]


def _batches(flats: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yield batches of consecutive tensors: of at most ``limit`` bytes, or of a single tensor."""
    batch: list[Tensor] = []
    nbytes = 0
    for flat in flats:
        if batch and nbytes + flat.nbytes > limit:
            yield batch
            batch, nbytes = [], 0
        batch.append(flat)
        nbytes += flat.nbytes
    if batch:
        yield batch


def _zeros(request: Request) -> list[Tensor]:
    """Return the contribution of a rank that has joined."""
    return [torch.zeros(math.prod(shape), dtype=request.dtype, device="cpu") for shape in request.shapes]


def _shares(n: int, size: int) -> list[int]:
    """Return how many of ``n`` rows each rank gets; the first ranks get one more if ``size`` does not divide ``n``."""
    return [n // size + (rank < n % size) for rank in range(size)]


def scale(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply in place: integers as float64, rounded toward zero; 16-bit floating-point numbers as float32."""
    for tensor in tensors if factor != 1.0 else ():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            tensor.copy_(tensor.double() * factor)
        elif tensor.element_size() == 2:
            tensor.copy_(tensor.float() * factor)
        else:
            tensor.mul_(factor)
