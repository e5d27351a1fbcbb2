"""Transfers between simulated ranks: which pairs, which messages, and what the times mean."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpitrain.predict.measurements import LinkTimes
from mpitrain.probe import transfers
from mpitrain.probe.transfers import measure_links, one_way_s

from ...simulators.simulated_mpi import Comm, World, simulate


def cluster_of(comm: Comm) -> Any:
    return SimpleNamespace(comm=comm, rank=comm.rank, size=comm.size, node_of=comm.world.node_of)


@pytest.mark.parametrize(
    ("node_of", "within", "between"),
    [
        ([0], None, None),
        ([0, 0, 0], [(0, 1)], None),
        ([0, 1], None, [(0, 1)]),
        ([0, 0, 2, 2, 2], [(0, 1)], [(0, 2), (1, 3)]),
        ([0, 1, 1, 1], [(1, 2)], [(0, 1)]),
        ([0, 1, 0, 1], [(0, 2)], [(0, 1), (2, 3)]),
    ],
    ids=str,
)
def test_the_pairs(monkeypatch: pytest.MonkeyPatch, node_of: list[int], within: Any, between: Any) -> None:
    asked: list[list[tuple[int, int]]] = []

    def measure(cluster: Any, pairs: list[tuple[int, int]], cpu_s_per_byte: float) -> Any:
        if cluster.rank == len(node_of) - 1:
            asked.append(pairs)
        return pairs, cpu_s_per_byte

    monkeypatch.setattr(transfers, "_measure", measure)
    monkeypatch.setattr(transfers, "_cpu_s_per_byte", lambda: 7.0)
    expected = tuple(None if pairs is None else (pairs, 7.0) for pairs in (within, between))
    assert World(node_of).run(lambda comm: measure_links(cluster_of(comm))) == [expected] * len(node_of)
    assert asked == [pairs for pairs in (within, between) if pairs is not None]


def test_only_pairs_measure_and_all_ranks_get_the_results() -> None:
    def program(comm: Comm) -> list[Any]:
        return transfers._on_pairs(cluster_of(comm), [(3, 0), (1, 4)], lambda own, other: (own.rank, other))

    assert World([0] * 5).run(program) == [[(0, 3), (1, 4), (3, 0), (4, 1)]] * 5


class Clock:
    """A clock of each thread, which advances by given durations at every second call."""

    def __init__(self, durations: list[float]) -> None:
        self._durations, self._own = durations, threading.local()

    def __call__(self) -> float:
        own = self._own
        own.calls = getattr(own, "calls", 0) + 1
        if own.calls % 2 == 0:
            own.now = getattr(own, "now", 0.0) + self._durations[own.calls // 2 - 1]
        return getattr(own, "now", 0.0)


def test_a_message_goes_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock([100.0, 100.0, 6.0, 2.0, 4.0, 8.0, 4.0, 4.0])
    monkeypatch.setattr(transfers, "time", SimpleNamespace(perf_counter=clock))

    def program(comm: Comm) -> tuple[float, list[float]]:
        data = np.full(3, float(comm.rank))
        return one_way_s(comm, 1 - comm.rank, data, 8), data.tolist()  # type: ignore[arg-type]

    # Without the first quarter, the median is 4 s for both directions.
    assert World([0, 0]).run(program) == [(2.0, [0.0] * 3)] * 2


def test_messages_that_are_posted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, [0, 0])
    monkeypatch.setattr(transfers, "_POSTED", 4)
    monkeypatch.setattr(transfers, "time", SimpleNamespace(perf_counter=Clock([9.0, 4.0, 8.0, 8.0, 1.0])))
    found = World([0, 0]).run(lambda comm: transfers._message_s(comm, 1 - comm.rank))  # type: ignore[arg-type]
    assert found == [2.0, 2.0]


def test_the_times_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, [0, 0])
    monkeypatch.setattr(transfers, "_PART", 64)
    monkeypatch.setattr(transfers, "time", SimpleNamespace(perf_counter=Clock([3.0, 1.0, 2.0])))
    found = World([0, 0]).run(lambda comm: transfers._exchange(comm, 1 - comm.rank, 3).tolist())  # type: ignore[arg-type]
    assert found == [[3.0, 1.0, 2.0]] * 2


@pytest.mark.parametrize(
    ("first_s", "later_s", "pairs", "rate", "burst"),
    [
        (1.0, 1.0, 1, 1.0, 0.0),
        (2.0, 2.0, 2, 0.5, 0.0),
        (1.0, 4.0, 1, 0.25, 7.5),  # 10 of 40 parts take 1 s, which is 7.5 parts more than at the later rate
        (3.0, 4.0, 1, 0.25, 0.0),
    ],
)
def test_the_rate_after_a_burst(
    monkeypatch: pytest.MonkeyPatch, first_s: float, later_s: float, pairs: int, rate: float, burst: float
) -> None:
    counts: list[int] = []

    def on_pairs(cluster: Any, given: Any, measure: Any) -> list[np.ndarray]:
        count = measure(None, 1)
        counts.append(count)
        times = np.full(count, later_s)
        times[:10] = first_s
        return [times / 2, times]  # the slower direction counts

    monkeypatch.setattr(transfers, "_on_pairs", on_pairs)
    monkeypatch.setattr(transfers, "_exchange", lambda comm, other, count: count)
    monkeypatch.setattr(transfers, "_PAUSE_S", 0.0)
    monkeypatch.setattr(transfers, "_LONGEST_S", 40 * first_s)
    found = transfers._rate(None, [(0, 1)] * pairs)  # type: ignore[arg-type]
    assert counts == [4, 4, 40]
    assert found == pytest.approx((pairs * rate * transfers._PART, pairs * burst * transfers._PART))


@pytest.mark.parametrize(("seconds", "count"), [(1e9, 8), (1e-9, 256)])
def test_the_number_of_parts_is_limited(monkeypatch: pytest.MonkeyPatch, seconds: float, count: int) -> None:
    counts: list[int] = []

    def on_pairs(cluster: Any, given: Any, measure: Any) -> list[np.ndarray]:
        counts.append(measure(None, 1))
        return [np.full(counts[-1], seconds)]

    monkeypatch.setattr(transfers, "_on_pairs", on_pairs)
    monkeypatch.setattr(transfers, "_exchange", lambda comm, other, count: count)
    monkeypatch.setattr(transfers, "_PAUSE_S", 0.0)
    transfers._rate(None, [(0, 1)])  # type: ignore[arg-type]
    assert counts[-1] == count


def test_one_pair_and_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def rate(cluster: Any, pairs: list[Any]) -> tuple[float, float]:
        asked.append(len(pairs))
        return 10.0 * len(pairs), 5.0

    monkeypatch.setattr(transfers, "_on_pairs", lambda cluster, pairs, measure: [1.0, 3.0])
    monkeypatch.setattr(transfers, "_rate", rate)
    assert transfers._measure(None, [(0, 1), (2, 3)], 7.0) == LinkTimes(2.0, 2.0, 10.0, 20.0, 5.0, 7.0)  # type: ignore[arg-type]
    assert transfers._measure(None, [(0, 1)], 7.0).node_bytes_per_s == 10.0  # type: ignore[arg-type]
    assert asked == [1, 2, 1]


def test_the_processor_time_of_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_LOCAL", 3 * transfers._PART)
    monkeypatch.setattr(transfers, "time", SimpleNamespace(thread_time=Clock([6.0])))
    assert transfers._cpu_s_per_byte() == pytest.approx(12.0 / (3 * transfers._PART))
