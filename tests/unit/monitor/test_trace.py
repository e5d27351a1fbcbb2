"""Spans add up to the elapsed time, all ranks use one clock, and viewers can read the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mpitrain.comm.clock_sync import best_offset
from mpitrain.errors import RecordError
from mpitrain.monitor.trace import (
    KINDS,
    Offset,
    RankTrace,
    Recorder,
    Spans,
    Track,
    on_chiefs_clock,
    record,
    span,
    stop_recording,
    waited_for,
    write,
)
from mpitrain.report.time_shares import GROUPS, read_shares

from ...support.run_directories import NO_OFFSET, Clock, spanning


class Model:
    """A class whose methods take time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    @span("forward")
    def forward(self, took: int) -> int:
        self.clock.now += took
        return 2 * took

    @span("backward")
    def backward(self, took: int, inner: int) -> None:
        self.clock.now += took
        self.forward(inner)

    @span("load")
    def fail(self) -> None:
        self.clock.now += 7
        raise ValueError("no")


@pytest.fixture
def recorded() -> Iterator[tuple[Clock, Recorder]]:
    clock = Clock()
    yield clock, record(10, clock)
    stop_recording()


def test_own_times_add_up_to_the_elapsed_time(recorded: tuple[Clock, Recorder]) -> None:
    clock, recorder = recorded
    model, track = Model(clock), recorder.track
    for _ in range(3):
        with span("step"):
            assert model.forward(100) == 200
            model.backward(40, inner=2)
            clock.now += 5
    assert track.seconds == {"step": 15e-9, "forward": 306e-9, "backward": 120e-9}
    assert sum(track.seconds.values()) == pytest.approx(clock.now / 1e9)
    assert track.n_steps == 3


def test_each_thread_has_a_track(recorded: tuple[Clock, Recorder]) -> None:
    clock, recorder = recorded
    model = Model(clock)
    model.forward(1)
    with ThreadPoolExecutor(1, "saving") as thread:
        thread.submit(model.forward, 2).result()
    assert {track.name: track.seconds for track in recorder.tracks} == {
        "training": {"forward": 1e-9},
        "saving": {"forward": 2e-9},
    }


def test_nothing_is_recorded_without_a_recorder() -> None:
    clock = Clock()
    recorder = record(10, clock)
    stop_recording()
    assert Model(clock).forward(10) == 20
    assert recorder.track.seconds == {}


def test_an_exception_is_raised_and_its_span_is_recorded(recorded: tuple[Clock, Recorder]) -> None:
    clock, recorder = recorded
    with pytest.raises(ValueError, match="no"), span("step"):
        Model(clock).fail()
    assert recorder.track.seconds == {"load": 7e-9}


@pytest.mark.parametrize(("keep", "steps"), [(5, 3), (5, 5), (5, 200), (1, 100)])
def test_the_last_steps_are_kept_whole_and_sums_cover_all(keep: int, steps: int) -> None:
    clock = Clock()
    track = Track("training", keep, clock)
    for _ in range(steps):
        with spanning(track, "step"):
            for _ in range(9):
                with spanning(track, "load"):
                    clock.now += 1
        clock.now += 3
    spans = track.spans()
    kept = min(keep, steps)
    assert (spans.kind == KINDS.index("step")).sum() == kept
    assert len(spans.kind) == 10 * kept
    assert spans.n_steps == steps
    assert track.seconds["load"] == pytest.approx(9e-9 * steps)


def test_steps_with_more_spans_than_there_is_room_for_are_whole_or_left_out() -> None:
    clock = Clock()
    track = Track("training", 3, clock)
    for _ in range(10):
        with spanning(track, "step"):
            for _ in range(40):
                with spanning(track, "load"):
                    clock.now += 1
    spans = track.spans()
    steps = (spans.kind == KINDS.index("step")).sum()
    assert 0 < steps < 3
    assert len(spans.kind) == 41 * steps


def test_the_shortest_trip_reports_the_offset() -> None:
    apart = 1_000_000  # nanoseconds by which the other clock is ahead
    trips = [(0, 900 + apart, 1000), (2000, 2050 + apart, 2100), (3000, 3000 + apart, 3400)]
    at, offset, error = best_offset(trips)
    assert (at, error) == (2100, 50)
    assert abs(offset - apart) <= error


def test_a_drifting_clock_is_set_right() -> None:
    truth = np.arange(0, 10**12, 10**11)
    theirs = ((truth - 12345) * (1 + 1e-5)).astype(np.int64)  # gains 10 us per second
    clocks = [Offset(int(theirs[i]), int(truth[i] - theirs[i]), 10) for i in (0, -1)]
    assert np.abs(on_chiefs_clock(theirs, clocks[0], clocks[1]) - truth).max() <= 2


def test_an_offset_within_its_error_is_none() -> None:
    times = np.arange(5)
    assert (on_chiefs_clock(times, Offset(0, 300, 400), Offset(9, -200, 300)) == times).all()


def steps_of(arrivals: list[tuple[int, int]], n_steps: int, first: int = 0) -> Spans:
    """Return steps of 100 ns with one wait each.

    Args:
        arrivals: The begin of each wait, from the begin of its step, and the length of the wait.
        n_steps: The number of steps of the run.
        first: The number of the first of the steps.
    """
    rows = []
    for step, (began, took) in enumerate(arrivals, first):
        rows += [(100 * step + began, took, KINDS.index("wait")), (100 * step, 100, KINDS.index("step"))]
    began, took, kind = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return Spans(began, took, kind, n_steps)


def test_the_last_to_arrive_is_waited_for() -> None:
    aligned = {
        0: steps_of([(10, 80), (50, 30)], 7),
        1: steps_of([(80, 10), (20, 60)], 7),
        2: steps_of([(30, 60), (70, 10)], 7),
    }
    assert waited_for(aligned) == {0: 0.0, 1: pytest.approx(120e-9), 2: pytest.approx(70e-9)}


def test_steps_that_one_rank_has_lost_are_left_out() -> None:
    aligned = {0: steps_of([(10, 80), (50, 30)], 7), 1: steps_of([(70, 10)], 7, first=1)}
    assert waited_for(aligned) == {0: 0.0, 1: pytest.approx(20e-9)}


def test_no_waits_no_steps() -> None:
    empty = Track("training", 4).spans()
    assert waited_for({0: empty, 1: empty}) == {0: 0.0, 1: 0.0}


def make_trace(path: Path) -> None:
    ranks = []
    for rank in range(3):
        clock = Clock()
        clock.now = 10**9 + 10**6 * rank  # clocks of three machines
        track, saving = Track("training", 10, clock), Track("saving", 10, clock)
        for _ in range(4):
            with spanning(track, "step"):
                with spanning(track, "forward"):
                    clock.now += 1000
                with spanning(track, "wait"):
                    clock.now += 500
        with spanning(saving, "save"):
            clock.now += 100
        clocks = (Offset(0, -(10**6) * rank, 10), Offset(10**10, -(10**6) * rank, 10))
        ranks.append(RankTrace.of(rank, f"worker {rank}", 'node "1"', [track, saving], clocks))
    write(path, ranks, same_steps=True)


def test_the_file_is_trace_event_format(tmp_path: Path) -> None:
    make_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 and event["name"] in KINDS for event in complete)
    assert {(event["pid"], event["tid"]) for event in complete} == {(r, t) for r in range(3) for t in range(2)}
    named = [event for event in events if event["name"] == "process_name"]
    assert [event["args"]["name"] for event in named] == [f'rank {r}, worker {r}, on node "1"' for r in range(3)]
    # Viewers nest spans by time: two spans of a thread must be disjoint, or one must contain the other.
    for rank in range(3):
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in complete if (e["pid"], e["tid"]) == (rank, 0)]
        for a in spans:
            for b in spans:
                assert (
                    a[1] <= b[0] or b[1] <= a[0] or (a[0] <= b[0] and b[1] <= a[1]) or (b[0] <= a[0] and a[1] <= b[1])
                )
    # On a common clock, all three ranks did the same at the same time.
    assert len({tuple(e["ts"] for e in complete if (e["pid"], e["tid"]) == (rank, 0)) for rank in range(3)}) == 1
    steps = [e["args"]["step"] for e in complete if e["name"] == "step" and e["pid"] == 1]
    assert steps == [1, 2, 3, 4]


def test_the_sum_is_read_back(tmp_path: Path) -> None:
    assert read_shares(tmp_path) is None
    make_trace(tmp_path / "trace.json")
    shares = read_shares(tmp_path)
    assert shares is not None
    assert shares.fraction("compute") == pytest.approx(2 / 3)
    assert shares.fraction("waiting") == pytest.approx(1 / 3)
    assert sum(shares.fraction(group) for group in GROUPS) == pytest.approx(1)
    assert shares.kept_wait_s == pytest.approx(3 * 4 * 500e-9)
    (tmp_path / "trace.json").write_text("[]")
    with pytest.raises(RecordError, match="cannot be read as a trace"):
        read_shares(tmp_path)


def test_every_kind_is_in_one_group() -> None:
    kinds = [kind for group in GROUPS.values() for kind in group]
    assert sorted(kinds) == sorted(KINDS)


def test_a_trace_of_nothing_is_a_trace(tmp_path: Path) -> None:
    write(
        tmp_path / "trace.json", [RankTrace.of(0, "worker 0", "n", [Track("training", 1)], NO_OFFSET)], same_steps=True
    )
    shares = read_shares(tmp_path)
    assert shares is not None
    assert shares.fraction("compute") == 0
