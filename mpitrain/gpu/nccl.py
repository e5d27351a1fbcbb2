"""NCCL through CuPy, if its library is installed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.layout import Array
from .stream import Stream

with warnings.catch_warnings():  # a missing library is reported when it is requested
    warnings.simplefilter("ignore")
    from cupy.cuda import nccl

available: bool = nccl.available


def unique_id() -> Any:
    """Return the identifier that all members of a new communicator need."""
    return nccl.get_unique_id()


class Communicator:
    """GPUs that sum vectors; construction is collective over them.

    Args:
        name: A ``unique_id``, the same on all ranks.

    Raises:
        Exception: NCCL's exception, if the members cannot connect.
    """

    def __init__(self, size: int, name: Any, rank: int) -> None:
        self._own = nccl.NcclCommunicator(size, name, rank)
        self._types = {np.dtype(np.float32): nccl.NCCL_FLOAT32, np.dtype(np.float64): nccl.NCCL_FLOAT64}

    def sum(self, vector: Array, stream: Stream) -> None:
        """Replace a vector on each GPU with the sum over all, on a stream. Collective."""
        place = vector.data.ptr  # type: ignore[attr-defined]
        self._own.allReduce(place, place, vector.size, self._types[vector.dtype], nccl.NCCL_SUM, stream.raw.ptr)

    def exchange(
        self, sent: Sequence[tuple[Array, int]], received: Sequence[tuple[Array, int]], stream: Stream
    ) -> None:
        """Send arrays to ranks, and receive arrays from ranks, on a stream. Collective.

        What a rank receives from another one comes in the order in which that one sends; empty arrays are left out.
        """
        nccl.groupStart()
        for operation, arrays in ((self._own.send, sent), (self._own.recv, received)):
            for array, rank in arrays:
                if array.size:
                    operation(array.data.ptr, array.size, self._types[array.dtype], rank, stream.raw.ptr)  # type: ignore[attr-defined]
        nccl.groupEnd()

    def destroy(self) -> None:
        """Free all resources; no operation may be pending."""
        self._own.destroy()
