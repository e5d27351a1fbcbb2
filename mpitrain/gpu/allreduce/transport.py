"""What a way of summing the gradients of GPUs offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...comm.hierarchy import Hierarchy
from ...core.layout import Array
from ...core.ranges import Bucket
from ..device import Gpu


class GpuTransport(Protocol):
    """Sums a vector on every worker's GPU over all workers, bucket by bucket. Construction is collective over them.

    Args:
        hierarchy: The workers.
        gpu: This worker's.
        vector: On it; sums take its place.
        buckets: Ranges that are summed in one go, the last first.

    Attributes:
        name: Of the way, as ``--gpu-transport`` has it.

    Raises:
        Unusable: On every worker: this way is not there.
    """

    name: str

    def __init__(self, hierarchy: Hierarchy, gpu: Gpu, vector: Array, buckets: Sequence[Bucket]) -> None: ...

    def start(self, index: int) -> None:
        """Begin to sum a bucket, which is complete when the GPU has done what it was asked for until now.

        To be called for one bucket after the other, by all workers; within ``gpu.activate()``, as ``finish``.
        """

    def finish(self) -> None:
        """Have the GPU go on when all sums are there; collective over the workers."""

    def free(self) -> None:
        """Give memory back; collective over the workers."""


class TransportUnavailable(Exception):
    """A way is not there; the message says why."""


def agree(hierarchy: Hierarchy, problem: str) -> None:
    """Raise on every worker what any has met; collective.

    Raises:
        Unusable: Some worker's ``problem`` is not empty.
    """
    found: list[Any] = hierarchy.comm.allgather(problem)
    first = next(filter(None, found), None)
    if first is not None:
        raise TransportUnavailable(first)
