"""Reductions between nodes, and tensors as messages of MPI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..comm.exchange import Exchange
from ..comm.mpi import MPI
from ..core.layout import Array
from ..core.ranges import aligned_range
from .reductions import Reduction

# The type of a wait within an operation, and of an operation; see ``collectives``.
Condition: TypeAlias = "int | MPI.Request"
Steps: TypeAlias = Iterator[Condition]

MESSAGE_BYTES = 256 << 20  # MPI counts are 32-bit integers in many libraries
_EXCHANGED_BYTES = 16 << 10  # each node reduces smaller chunks completely; larger chunks are divided among the nodes
_BLOCK_BYTES = 1 << 20  # size of a block between two nodes; small enough for the cache


def reduce_chunk(chunk: Tensor, reduction: Reduction, internode: MPI.Intracomm) -> Steps:
    """Reduce ``chunk`` over the nodes, in their order. Collective over ``internode``."""
    n_nodes = internode.size
    if n_nodes == 2:
        yield from _reduce_over_two_nodes(chunk, reduction, internode)
        return
    if chunk.numel() * chunk.element_size() <= _EXCHANGED_BYTES:
        received = chunk.new_empty((n_nodes, chunk.numel()))
        yield internode.Iallgather(_bytes(chunk), _bytes(received))
        reduction(received.unbind(), chunk)
        return

    def reduce(rows: Array, out: Array) -> None:
        parts = torch.from_numpy(rows).view(chunk.dtype)
        reduction(parts.unbind(), torch.from_numpy(out).view(chunk.dtype))

    memory, width = _memory(chunk), chunk.element_size()
    ranges = [aligned_range(0, chunk.numel(), node, n_nodes) for node in range(n_nodes)]
    exchange = Exchange(internode, [(width * lo, width * hi) for lo, hi in ranges], np.uint8, reduce, np.empty)
    exchange.start(memory)
    yield exchange.requests[0]
    exchange.finish(memory)
    yield exchange.share(memory)


def _reduce_over_two_nodes(chunk: Tensor, reduction: Reduction, internode: MPI.Intracomm) -> Steps:
    """Do the same as ``reduce_chunk``; each block is reduced while the next block is transferred."""
    other = 1 - internode.rank
    parts = chunk.split(max(1, _BLOCK_BYTES // chunk.element_size()))
    buffers = [torch.empty_like(part) for part in parts[:2]]

    def exchange(index: int) -> tuple[Tensor, list[MPI.Request]]:
        part = parts[index]
        received = buffers[index % 2][: part.numel()]
        return received, [internode.Irecv(_bytes(received), other), internode.Isend(_bytes(part), other)]

    following = exchange(0)
    for index, part in enumerate(parts):
        received, requests = following
        if index + 1 < len(parts):
            following = exchange(index + 1)
        yield from requests
        reduction((part, received) if other else (received, part), part)


def _memory(tensor: Tensor) -> Any:
    """Return a contiguous tensor's memory as a NumPy array of bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _bytes(tensor: Tensor) -> list[Any]:
    """Return a contiguous tensor as a buffer of MPI."""
    return [_memory(tensor), MPI.BYTE]


def messages_of(tensor: Tensor) -> list[list[Any]]:
    """Return a contiguous tensor as buffers of MPI that are small enough for its counts."""
    memory = _memory(tensor)
    return [[memory[lo : lo + MESSAGE_BYTES], MPI.BYTE] for lo in range(0, max(1, memory.size), MESSAGE_BYTES)]
