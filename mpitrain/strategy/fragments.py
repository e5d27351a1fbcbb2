"""When each fragment of the parameters is exchanged: one after the other, overlapped with local steps.

In each cycle of H local steps, each of P fragments is exchanged once. Fragment i is merged after (i + 1) * H / P steps
of the cycle. Its exchange begins ``overlap`` steps earlier. An exchange ends before the next exchange begins. No
exchange is in progress at the end of a cycle, which is the consistent point, so checkpoints contain no pending
messages.

    step of the cycle    1   2   3   4   5   6   7   8         H = 8, P = 2, overlap = 2
    fragment 0               begin   merge
    fragment 1                               begin   merge     consistent point after the merge

Streaming DiLoCo (Douillard et al., Streaming DiLoCo with overlapping communication, 2025) does the same with whole
layers as fragments. The fragments here are ranges of equal size, so that each exchange takes the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..core.layout import Array
from ..core.ranges import aligned_range
from ..plan.parallel import ParallelConfig


class Fragment(NamedTuple):
    """A range [lo, hi) of the vector.

    Attributes:
        begins: The step of the cycle, from 1, after which its exchange begins.
        merges: The step of the cycle after which the result is merged.
    """

    lo: int
    hi: int
    begins: int
    merges: int

    def of(self, vector: Array) -> Array:
        """Return a view of this range of a vector, or of several, shape (..., hi - lo)."""
        return vector[..., self.lo : self.hi]


def fragments_of(size: int, parallel: ParallelConfig) -> Iterator[Fragment]:
    """Yield the fragments of a vector of ``size`` elements, in the order in which they are exchanged."""
    n, steps = parallel.n_fragments, parallel.steps_per_average
    for index in range(n):
        merges = (index + 1) * steps // n
        yield Fragment(*aligned_range(0, size, index, n), merges - parallel.steps_of_overlap, merges)
