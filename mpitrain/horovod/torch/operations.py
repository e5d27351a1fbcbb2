"""The operations on tensors.

The functions that end in ``async`` or ``async_`` return a handle, except ``sparse_allreduce_async``, which returns a
function. The other functions wait for the result, and can be differentiated if they do not work in place.

An operation starts when all ranks of its process set have submitted it under the same name, in any order. Operations
without a name are numbered, so the ranks must submit them in the same order. ``Request`` lists the properties that must
be equal on all ranks. Submitting is local; waiting needs the other ranks.

All functions may raise:
    ValueError: An argument is not valid, an operation of the same name is pending, or ``init`` has not been called.
    HorovodInternalError: While waiting: the ranks have submitted different operations, or a rank has shut down.
"""

from __future__ import annotations

from .allgather import allgather, allgather_async, grouped_allgather, grouped_allgather_async
from .allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from .alltoall import alltoall, alltoall_async
from .broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from .reducescatter import grouped_reducescatter, grouped_reducescatter_async, reducescatter, reducescatter_async
from .sparse import sparse_allreduce_async
from .submission import Adasum, Average, Max, Min, Product, Sum, barrier, join, poll, synchronize

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
