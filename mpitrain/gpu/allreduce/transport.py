"""The interface of transports that sum gradients of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...comm.hierarchy import Hierarchy
from ...core.layout import Array
from ...core.ranges import Bucket
from ..device import Gpu


class GpuTransport(Protocol):
    """Sums vectors over all workers' GPUs, bucket by bucket. Construction is collective over the workers.

    Args:
        hierarchy: The workers.
        gpu: This worker's GPU.
        vectors: Vectors on this GPU, usually one; the sum of those of all workers replaces the last one.
        buckets: Ranges that are summed in one operation, last first.
        leaves: The number of virtual workers, whose sums are added by a tree (``comm.sum_order``); None without them.

    Attributes:
        name: Name of the transport, as in ``--gpu-transport``.

    Raises:
        TransportUnavailable: On every worker: this transport cannot be used.
    """

    name: str

    def __init__(
        self, hierarchy: Hierarchy, gpu: Gpu, vectors: Sequence[Array], buckets: Sequence[Bucket], leaves: int | None
    ) -> None: ...

    def start(self, index: int) -> None:
        """Start to sum a bucket, whose values are computed by the work enqueued on the GPU so far.

        Call this for each bucket in order, on all workers. Call this and ``finish`` within ``gpu.activate()``.
        """

    def finish(self) -> None:
        """Make later GPU work wait for all sums. Collective over the workers."""

    def free(self) -> None:
        """Free memory. Collective over the workers."""


class TransportUnavailable(Exception):
    """A transport cannot be used; the message states the reason."""


def agree(hierarchy: Hierarchy, problem: str) -> None:
    """Raise an error on every worker if any worker has a problem. Collective over the workers.

    Raises:
        TransportUnavailable: The ``problem`` of some worker is not empty.
    """
    found: list[Any] = hierarchy.comm.allgather(problem)
    first = next(filter(None, found), None)
    if first is not None:
        raise TransportUnavailable(first)
