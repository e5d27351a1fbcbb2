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
        progress: Called while this rank waits for others.
    """

    def __init__(self, hierarchy: Hierarchy, buckets: Sequence[Bucket], progress: Callable[[], object]) -> None:
        self._buckets, self._progress = buckets, progress
        self._barrier, self._n_arrived = PhaseBarrier(hierarchy.shared, hierarchy.cores), 0
        self._arriving: list[int] = []  # indices of buckets, in the order of their arrival
        self._sums: NodeSums | None = None

    def begin(self, sums: NodeSums) -> None:
        """Begin to send the parameters that this rank owns to the other nodes."""
        self._sums, self._arriving = sums, list(reversed(range(len(self._buckets))))
        for index in self._arriving:
            sums.share(index)

    @span("average")
    def wait(self, stop: int) -> None:
        """Return when the first ``stop`` elements of the parameters are complete."""
        while self._arriving and self._buckets[self._arriving[0]].lo < stop:
            assert self._sums is not None
            self._sums.complete(self._arriving.pop(0))
            self._n_arrived += 1
            self._barrier.publish(self._n_arrived)
            self._barrier.wait(self._n_arrived, self._progress)
            if not self._arriving:
                self._sums.end_step()

    def wait_for_all(self) -> None:
        """Return when all parameters are complete; quick if none are late."""
        if self._arriving:
            self.wait(self._buckets[0].hi)
