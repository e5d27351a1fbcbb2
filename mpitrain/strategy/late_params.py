"""Parameters that arrive from other nodes while the next step computes; those of the first layers arrive first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..comm.hierarchy import Hierarchy
from ..comm.internode import NodeSums
from ..comm.phase_barrier import PhaseBarrier
from ..core.ranges import Bucket
from ..monitor.trace import span


class LateParams:
    """Waits for the parameters of a node, bucket by bucket.

    Construction is collective over the node. ``begin`` is local; the other methods are collective over the node,
    because each rank receives its part of every bucket. The number of calls may differ between ranks.

    Args:
        buckets: The buckets of the vector, last first.
        sums: Shares the parameters between nodes.
        progress: Called while this rank waits for others.
    """

    def __init__(
        self, hierarchy: Hierarchy, buckets: Sequence[Bucket], sums: NodeSums, progress: Callable[[], object]
    ) -> None:
        self._buckets, self._sums, self._progress = buckets, sums, progress
        self._barrier = PhaseBarrier(hierarchy.shared, hierarchy.cores)
        self._arriving: list[int] = []  # indices of buckets, in the order of their arrival

    def begin(self) -> None:
        """Begin to send the parameters that this rank owns to the other nodes."""
        self._arriving = list(reversed(range(len(self._buckets))))
        for index in self._arriving:
            self._sums.share(index)

    @span("average")
    def wait(self, stop: int) -> None:
        """Return when the first ``stop`` elements of the parameters are complete."""
        while self._arriving and self._buckets[self._arriving[0]].lo < stop:
            self._sums.complete(self._arriving.pop(0))
            self._barrier.meet(self._progress)
            if not self._arriving:
                self._sums.end_step()

    def wait_for_all(self) -> None:
        """Return when all parameters are complete; quick if none are late."""
        if self._arriving:
            self.wait(self._buckets[0].hi)
