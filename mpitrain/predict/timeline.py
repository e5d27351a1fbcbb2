"""The result of a simulation: when steps end, what is sent, and spans of a timeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..core.layout import Array


class SimulatedSpan(NamedTuple):
    """An activity of a rank for some time; ``kind`` is one of ``monitor.trace.KINDS``."""

    rank: int
    kind: str
    began_s: float
    took_s: float


@dataclass
class Timeline:
    """The events of a simulated run.

    Attributes:
        ends: The times at which steps end, in seconds, ascending.
        staleness: For each gradient, the number of steps since the parameters from which it was computed.
        dropped: Number of gradients that were computed and not used.
        sent: Bytes that each node has sent to others.
        spans: The activities of ranks, if they are recorded.
    """

    records: bool = False
    ends: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    dropped: int = 0
    sent: Array = field(default_factory=lambda: np.zeros(1))
    spans: list[SimulatedSpan] = field(default_factory=list)

    def add(self, rank: int, kind: str, began_s: float, ended_s: float) -> None:
        """Record a span."""
        if self.records and ended_s > began_s:
            self.spans.append(SimulatedSpan(rank, kind, began_s, ended_s - began_s))

    @property
    def steps_per_s(self) -> float:
        """Steps per second, without the first tenth of the steps."""
        first = len(self.ends) // 10
        return (len(self.ends) - 1 - first) / (self.ends[-1] - self.ends[first])
