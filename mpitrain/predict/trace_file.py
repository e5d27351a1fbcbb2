"""The timeline of a simulation as a file for trace viewers, in the form of ``--trace``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..monitor import trace
from ..monitor.trace import KINDS, Offset, RankTrace, Spans
from .scenario import Scenario
from .timeline import SimulatedSpan, Timeline

_NO_OFFSET = Offset(0, 0, 1)


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
        ranks.append(RankTrace(rank, role, f"node {scenario.node_of[rank]}", [track], (_NO_OFFSET, _NO_OFFSET)))
    trace.write(path, ranks, same_steps=False)


def _as_spans(spans: list[SimulatedSpan]) -> Spans:
    ordered = sorted(spans, key=lambda span: span.began_s + span.took_s)
    began = np.array([round(span.began_s * 1e9) for span in ordered], np.int64)
    took = np.array([round(span.took_s * 1e9) for span in ordered], np.int64)
    kind = np.array([KINDS.index(span.kind) for span in ordered], np.int8)
    return Spans(began, took, kind, int((kind == KINDS.index("step")).sum()))


def _seconds(spans: list[SimulatedSpan]) -> dict[str, float]:
    """Return the seconds of spans by kind; those of a step without the spans inside."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.kind] = seconds.get(span.kind, 0.0) + span.took_s
    if "step" in seconds:
        seconds["step"] = max(0.0, seconds["step"] - sum(s for kind, s in seconds.items() if kind != "step"))
    return seconds
