"""The result of a simulation: when steps end, what is sent, and spans of a timeline; and its file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..core.layout import Array
from ..monitor import trace
from .scenario import Scenario

_NO_OFFSET = trace.Offset(0, 0, 1)


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


def write_trace(path: Path, scenario: Scenario, run: Timeline) -> None:
    """Write the recorded spans of all ranks.

    Raises:
        OSError: The file cannot be written.
    """
    of_rank: dict[int, list[SimulatedSpan]] = {rank: [] for rank in range(scenario.n_ranks)}
    for span in run.spans:
        of_rank[span.rank].append(span)
    servers, workers = scenario.servers, scenario.workers
    ranks = []
    for rank, spans in of_rank.items():
        role = f"ps {servers.index(rank)}" if rank in servers else f"worker {workers.index(rank)}"
        track = ("training", _as_spans(spans), _seconds(spans))
        ranks.append(trace.RankTrace(rank, role, f"node {scenario.node_of[rank]}", [track], (_NO_OFFSET, _NO_OFFSET)))
    trace.write(path, ranks, same_steps=False)


def _as_spans(spans: list[SimulatedSpan]) -> trace.Spans:
    ordered = sorted(spans, key=lambda span: span.began_s + span.took_s)
    began = np.array([round(span.began_s * 1e9) for span in ordered], np.int64)
    took = np.array([round(span.took_s * 1e9) for span in ordered], np.int64)
    kind = np.array([trace.KINDS.index(span.kind) for span in ordered], np.int8)
    return trace.Spans(began, took, kind, int((kind == trace.KINDS.index("step")).sum()))


def _seconds(spans: list[SimulatedSpan]) -> dict[str, float]:
    """Return the seconds of spans by kind; those of a step without the spans inside."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.kind] = seconds.get(span.kind, 0.0) + span.took_s
    if "step" in seconds:
        seconds["step"] = max(0.0, seconds["step"] - sum(s for kind, s in seconds.items() if kind != "step"))
    return seconds
