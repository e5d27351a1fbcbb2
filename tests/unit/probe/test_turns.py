"""Ranks, which are threads, measure one at a time or all at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpitrain.probe import turns
from mpitrain.probe.turns import all_at_once, await_all, median_of_ranks, median_over_ranks, median_s, one_at_a_time

from ...simulators.simulated_mpi import Comm, World


def cluster_of(comm: Comm) -> Any:
    return SimpleNamespace(comm=comm, rank=comm.rank, size=comm.size)


@pytest.mark.parametrize("rank", range(3))
def test_one_rank_measures_after_the_other(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    events: list[str] = []

    def measure() -> int:
        events.append("measure")
        return 10 * rank

    monkeypatch.setattr(turns, "await_all", lambda comm: events.append("wait"))
    cluster: Any = SimpleNamespace(comm=None, rank=rank, size=3)
    assert one_at_a_time(cluster, measure) == 10 * rank
    assert events == ["wait"] * rank + ["measure"] + ["wait"] * (3 - rank)


def test_no_rank_begins_or_leaves_before_all_are_there() -> None:
    events: list[str] = []

    def program(comm: Comm) -> int:
        events.append("before")

        def measure() -> int:
            events.append("during")
            return comm.rank

        result = all_at_once(cluster_of(comm), measure)
        events.append("after")
        return result

    assert World([0, 0, 1]).run(program) == [0, 1, 2]
    assert events == ["before"] * 3 + ["during"] * 3 + ["after"] * 3


def test_all_are_awaited() -> None:
    arrived: list[int] = []

    def program(comm: Comm) -> int:
        arrived.append(comm.rank)
        await_all(comm)  # type: ignore[arg-type]
        return len(arrived)

    assert World([0] * 4).run(program) == [4] * 4


def test_medians_over_ranks() -> None:
    rows = np.array([[1.0, 9.0], [2.0, 7.0], [40.0, 8.0]])

    def program(comm: Comm) -> tuple[tuple[float, ...], float]:
        own: Any = comm
        return median_over_ranks(own, rows[comm.rank].tolist()), median_of_ranks(own, rows[comm.rank, 1])

    assert World([0, 1, 2]).run(program) == [((2.0, 8.0), 8.0)] * 3


@pytest.mark.parametrize(
    ("durations", "seconds", "calls", "median"),
    [([50, 1, 2, 9], 0.0, 4, 2), ([50, 1, 3, 3, 1, 1, 1], 8.5, 6, 1), ([50, 4, 1, 1, 1], 5.5, 4, 1)],
)
def test_the_median_of_repetitions_without_the_first(
    monkeypatch: pytest.MonkeyPatch, durations: list[float], seconds: float, calls: int, median: float
) -> None:
    now, made = 0.0, 0
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: now))

    def action() -> None:
        nonlocal now, made
        now += durations[made]
        made += 1

    assert (median_s(action, seconds), made) == (median, calls)
