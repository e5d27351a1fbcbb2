"""NCCL by CuPy, which has it where its library is installed."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from ..core.layout import Array
from .stream import Stream

with warnings.catch_warnings():  # that it is missing is told where it is asked for
    warnings.simplefilter("ignore")
    from cupy.cuda import nccl

available: bool = nccl.available


def unique_id() -> Any:
    """What the members of a communicator are given to find each other."""
    return nccl.get_unique_id()


class Communicator:
    """GPUs that sum together; construction is collective over them.

    Args:
        name: The same ``unique_id`` for all.

    Raises:
        Exception: NCCL's own, if they do not find each other.
    """

    def __init__(self, size: int, name: Any, rank: int) -> None:
        self._own = nccl.NcclCommunicator(size, name, rank)
        self._types = {np.dtype(np.float32): nccl.NCCL_FLOAT32, np.dtype(np.float64): nccl.NCCL_FLOAT64}

    def sum(self, vector: Array, stream: Stream) -> None:
        """Replace a vector of each GPU by the sum of all, on a stream; collective."""
        place = vector.data.ptr  # type: ignore[attr-defined]
        self._own.allReduce(place, place, vector.size, self._types[vector.dtype], nccl.NCCL_SUM, stream.raw.ptr)

    def destroy(self) -> None:
        """Give everything back; nothing may be under way."""
        self._own.destroy()
