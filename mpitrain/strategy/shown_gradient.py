"""The gradient of ``sync`` as scripts see it, which they may change before the update.

The update begins after the backward pass. When the script of a rank first uses a gradient, the rank sums all rows to a
vector of its own, and updates its ranges with that. Several nodes exchange the averages, not the parameters, and every
node updates all parameters. No rank writes its row again before all ranks of the node have begun their next batch,
because their scripts may see the gradient until then.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from ..comm.hierarchy import Hierarchy
from ..comm.internode import NodeSums
from ..comm.sum_order import SumOrder
from ..core.kernels import sum_rows
from ..core.layout import Array, row_stride
from ..plan.plan import Plan
from .agreement import Agreement

_Rows: TypeAlias = tuple[Array, Array]  # rows, and the order in which they are added
_FIRST = np.zeros(1, np.int64)  # the order of a single row


class ShownGradient:
    """The gradient that this rank's script sees; see ``Strategy`` for the methods without a description.

    Args:
        rows: The rows of the node's ranks.
        order: How they are added.
        is_used: Whether averages are completed before the update. If not, or if this rank is alone on its node, the
            gradient is the row of this rank.

    Attributes:
        values: Shape (layout.size,): the gradient, after ``fetch_grads``.
        mean: Shape (layout.size,): the average over several nodes, shared by the node's ranks.
    """

    def __init__(
        self, hierarchy: Hierarchy, plan: Plan, agreement: Agreement, rows: Array, order: SumOrder, is_used: bool
    ) -> None:
        size = plan.layout.size
        self._agreement, self._n_trained = agreement, plan.layout.n_trained
        self._own = self.values = self.mean = rows[order.own[-1], :size]
        self._averages: _Rows | None = None  # the rows whose sum is the average; None if it is in ``values``
        if is_used and order.n_rows > 1:
            self.values, self._averages = np.zeros(size, plan.dtype), (rows, order.order)
            if hierarchy.n_nodes > 1:
                self.mean = hierarchy.shared.allocate((row_stride(size),), plan.dtype)[:size]
                self._averages = self.mean[np.newaxis], _FIRST
        self._unseen: _Rows | None = None  # rows whose sum is the gradient, until it is in ``values``
        self._rows_are_read = False  # whether other ranks may read this rank's row, the same on all ranks

    @property
    def rows(self) -> _Rows:
        """Rows whose sum is the gradient, and their order."""
        return (self.values[np.newaxis], _FIRST) if self._unseen is None else self._unseen

    def complete(self, sums: NodeSums) -> None:
        """Complete the averages of this rank's parts."""
        for index, owned in enumerate(sums.owned):
            sums.finish(index)
            if self.mean is not self._own:
                for lo, hi in owned:
                    self.mean[lo:hi] = self._own[lo:hi]
            sums.share(index)
        sums.complete_all()
        self._unseen = self._averages
        self._agreement.publish()

    def norm(self) -> float:
        """Return the norm of the gradient. Local."""
        self.fetch_grads()
        return float(np.linalg.norm(self.values[: self._n_trained].astype(np.float64)))

    def fetch_grads(self) -> None:
        if self._unseen is not None:
            self._agreement.wait()  # until the node's ranks have written their parts
            sum_rows(*self._unseen, 0, len(self.values), 1.0, self.values)
            self._unseen = None

    def begin_batch(self) -> None:
        self._unseen, self._rows_are_read = None, False
        self._agreement.publish()

    def begin_backward(self, kept: float | None, averages: bool) -> None:
        # Whether ranks wait must not depend on what the script of one of them has looked at.
        if kept is not None and (self._rows_are_read or self._unseen is None or kept != 1):
            self.fetch_grads()
        is_seen = self._unseen is None
        if self._rows_are_read:
            self._agreement.node_barrier()  # no rank of the node reads this rank's row any more
        else:
            self._agreement.wait()
        if kept is not None and is_seen:
            n = self._n_trained
            np.multiply(self.values[:n], kept, out=self._own[:n])
            self._own[n:] = self.values[n:]  # state is weighted by each worker's share already
        self._unseen, self._rows_are_read = None if averages else (self._own[np.newaxis], _FIRST), averages
