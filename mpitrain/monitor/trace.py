"""Time spans of a rank's activities, recorded on every rank and written to one file for trace viewers.

Code marks its phases with ``span``, as a decorator or a context manager. Without ``--trace`` a span costs a fraction of
a microsecond, and only marks the activity that the rank's reaper watches.

Totals cover the whole run. Individual spans are kept only for the last steps, in preallocated arrays. At the end the
chief gathers the spans, and converts their times to its own clock. It writes a file in Trace Event Format (JSON), which
Perfetto and chrome://tracing can open.
"""

from __future__ import annotations

import functools
import json
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..core import activity
from ..core.layout import Array

TRACE = "trace.json"
# The kinds of spans; ``step`` is the part of a step that no other kind covers.
KINDS = activity.KINDS[: activity.KINDS.index("hooks") + 1]
_STEP, _WAIT = KINDS.index("step"), KINDS.index("wait")
_SPANS_A_STEP = 32  # sets the array size; if steps have more spans, fewer steps are kept

_BACKGROUND_STEPS = 100  # steps for which the track of a background thread keeps spans; such a thread has few spans

Function = TypeVar("Function", bound=Callable[..., Any])


class Track:
    """The spans of one thread of a rank. All methods are local; only that thread may call ``begin`` and ``end``.

    A span's own time excludes the spans inside it. ``seconds`` sums own times by kind.

    Args:
        name: Name of the thread.
        keep_steps: Number of steps whose spans are kept.
        clock: Returns nanoseconds; the host's clock, which its ranks share.
    """

    def __init__(self, name: str, keep_steps: int, clock: Callable[[], int] = perf_counter_ns) -> None:
        self.name, self.keep_steps, self._now = name, keep_steps, clock
        self._capacity = max(1, keep_steps) * _SPANS_A_STEP
        self._began = array("q", bytes(8 * self._capacity))
        self._elapsed_ns = array("q", bytes(8 * self._capacity))
        self._kind = array("b", bytes(self._capacity))
        self._own_ns = [0] * len(KINDS)
        self._count = 0
        self._inner_ns = 0  # total time of the spans inside the current one
        self._open: list[tuple[int, int, int]] = []  # kind, begin, and ``_inner_ns`` of the enclosing span
        self.n_steps = 0

    def begin(self, kind: int) -> None:
        """Begin a span; ``kind`` is an index into ``KINDS``."""
        self._open.append((kind, self._now(), self._inner_ns))
        self._inner_ns = 0

    def end(self) -> None:
        """End the innermost span."""
        kind, began, outer_ns = self._open.pop()  # outer_ns: the time of earlier spans inside the enclosing span
        elapsed_ns = self._now() - began
        self._own_ns[kind] += elapsed_ns - self._inner_ns
        self._inner_ns = outer_ns + elapsed_ns
        at = self._count % self._capacity
        self._began[at], self._elapsed_ns[at], self._kind[at] = began, elapsed_ns, kind
        self._count += 1
        if kind == _STEP:
            self.n_steps += 1

    @property
    def seconds(self) -> dict[str, float]:
        """Own time by kind, over the whole run."""
        return {kind: ns / 1e9 for kind, ns in zip(KINDS, self._own_ns, strict=True) if ns}

    def spans(self) -> Spans:
        """Return the kept spans: at most ``keep_steps`` complete steps, ordered by the end of spans."""
        kept = min(self._count, self._capacity)
        order = (np.arange(self._count - kept, self._count) % self._capacity).astype(np.int64)
        began, elapsed_ns = (np.frombuffer(a, np.int64)[order] for a in (self._began, self._elapsed_ns))
        kind = np.frombuffer(self._kind, np.int8)[order]
        steps = began[kind == _STEP]
        if self._count > kept and len(steps):
            steps = steps[steps > began[0]]  # the oldest span's step may be incomplete
        cut = len(steps) > 0 and (self._count > kept or len(steps) > self.keep_steps)
        whole = began >= steps[-self.keep_steps :][0] if cut else np.ones(kept, bool)
        return Spans(began[whole], elapsed_ns[whole], kind[whole], self.n_steps)


class Recorder:
    """The tracks of this process's threads.

    Args:
        keep_steps: Number of steps whose spans the training thread's track keeps.
        clock: See ``Track``.

    Attributes:
        tracks: The tracks of the threads, the training thread's first.
    """

    def __init__(self, keep_steps: int, clock: Callable[[], int] = perf_counter_ns) -> None:
        self._by_thread, self._clock = threading.local(), clock
        self._by_thread.track = Track("training", keep_steps, clock)
        self.tracks: list[Track] = [self._by_thread.track]

    @property
    def track(self) -> Track:
        """The track of the calling thread, with the thread's name."""
        track: Track | None = getattr(self._by_thread, "track", None)
        if track is None:
            name = threading.current_thread().name.split("_")[0]
            track = self._by_thread.track = Track(name, _BACKGROUND_STEPS, self._clock)
            self.tracks.append(track)
        return track


_recorder: Recorder | None = None


def record(keep_steps: int, clock: Callable[[], int] = perf_counter_ns) -> Recorder:
    """Record spans from now on; call it in the training thread. Local."""
    global _recorder
    _recorder = Recorder(keep_steps, clock)
    return _recorder


def stop_recording() -> None:
    """Record no further spans. Local."""
    global _recorder
    _recorder = None


class span:
    """Records a block, or each call of a function, as a span of the calling thread: ``with span("wait"): ...``.

    Args:
        kind: One of ``KINDS``.
    """

    __slots__ = ("_kind",)

    def __init__(self, kind: str) -> None:
        self._kind = KINDS.index(kind)

    def __enter__(self) -> None:
        activity.enter(self._kind)
        if _recorder is not None:
            _recorder.track.begin(self._kind)

    def __exit__(self, *error: object) -> None:
        activity.leave()
        if _recorder is not None:
            _recorder.track.end()

    def __call__(self, function: Function) -> Function:
        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return recorded  # type: ignore[return-value]


class Spans(NamedTuple):
    """Spans of one track.

    Attributes:
        began, elapsed_ns: Shape (n,) int64, nanoseconds.
        kind: Shape (n,) int8, index into ``KINDS``.
        n_steps: Number of steps up to the last span.
    """

    began: Array
    elapsed_ns: Array
    kind: Array
    n_steps: int


class Offset(NamedTuple):
    """The offset from a rank's clock to the chief's clock, and its error bound; nanoseconds.

    Attributes:
        at: Time of the measurement, on the rank's clock.
        offset: To be added to the rank's clock.
        error: Upper bound of the offset's error.
    """

    at: int
    offset: int
    error: int


@dataclass(frozen=True)
class RankTrace:
    """The spans that one rank has recorded, as sent to the chief.

    Attributes:
        rank: Its rank in the run.
        role: Such as ``worker 0``.
        host: Its host name.
        tracks: Name, spans and totals of each thread, the training thread first.
        clocks: Offsets measured at the beginning and at the end.
    """

    rank: int
    role: str
    host: str
    tracks: list[tuple[str, Spans, dict[str, float]]]
    clocks: tuple[Offset, Offset]

    @classmethod
    def of(cls, rank: int, role: str, host: str, tracks: Sequence[Track], clocks: tuple[Offset, Offset]) -> RankTrace:
        """Collect a rank's tracks. Local."""
        return cls(rank, role, host, [(track.name, track.spans(), track.seconds) for track in tracks], clocks)


def on_chiefs_clock(times: Array, before: Offset, after: Offset) -> Array:
    """Convert a rank's times, shape (n,) int64 ns, to the chief's clock.

    The offset is interpolated linearly between the two measurements, because clocks drift. An offset no larger than its
    error is taken as 0: ranks of a host share its clock.
    """
    first, last = (0 if abs(o.offset) <= o.error else o.offset for o in (before, after))
    span = max(1, after.at - before.at)
    drift = (times - before.at) / span * (last - first)
    return times + first + np.rint(drift).astype(np.int64)


def write(path: Path, ranks: Sequence[RankTrace], same_steps: bool) -> dict[str, Any]:
    """Write the trace of all ranks; return its summary, which the file also contains under ``mpitrain``.

    Args:
        same_steps: Whether all workers take the same steps, so that waits can be attributed to ranks.

    Raises:
        OSError: The file cannot be written.
    """
    aligned = {
        (trace.rank, thread): spans._replace(began=on_chiefs_clock(spans.began, *trace.clocks))
        for trace in ranks
        for thread, (_, spans, _) in enumerate(trace.tracks)
    }
    origin = min((int(spans.began.min()) for spans in aligned.values() if len(spans.began)), default=0)
    training = {rank: spans for (rank, thread), spans in aligned.items() if thread == 0 and spans.n_steps}
    summary = summarize(ranks, training, waited_for(training) if same_steps else {})
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms",\n"mpitrain": ' + json.dumps(summary) + ',\n"traceEvents": [\n')
        file.write(",\n".join(event for trace in ranks for event in _names(trace)))
        for (rank, thread), spans in aligned.items():  # written one by one to save memory
            file.writelines(f",\n{event}" for event in _events(rank, thread, spans, origin))
        file.write("\n]}\n")
    partial.replace(path)
    return summary


def summarize(ranks: Sequence[RankTrace], aligned: dict[int, Spans], waited: dict[int, float]) -> dict[str, Any]:
    """Return each rank's own seconds by kind, and the seconds that others waited for it in the kept steps.

    Args:
        aligned: The workers' training spans, on one clock.
        waited: The result of ``waited_for``; empty if the workers take different steps.
    """
    return {
        "ranks": [
            {
                "rank": trace.rank,
                "role": trace.role,
                "host": trace.host,
                "steps": trace.tracks[0][1].n_steps,
                "seconds": trace.tracks[0][2],
                "background": {name: seconds for name, _, seconds in trace.tracks[1:]},
                "waited_for_s": waited.get(trace.rank, 0.0),
                "clock_error_us": max(clock.error for clock in trace.clocks) / 1e3,
            }
            for trace in ranks
        ],
        "kept_steps": max((int((spans.kind == _STEP).sum()) for spans in aligned.values()), default=0),
        "kept_wait_s": sum(int(spans.elapsed_ns[spans.kind == _WAIT].sum()) for spans in aligned.values()) / 1e9,
    }


def waited_for(aligned: dict[int, Spans]) -> dict[int, float]:
    """Return the seconds that all ranks together waited for each rank; they wait at the same places of the same steps.

    Each rank waits from its own arrival at a place until the last rank arrives there.
    """
    arrivals: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for rank, spans in aligned.items():
        for place, began, elapsed_ns in _waits(spans):
            arrivals.setdefault(place, []).append((began, elapsed_ns, rank))
    seconds = dict.fromkeys(aligned, 0.0)
    for arrived in arrivals.values():
        last, _, rank = max(arrived)
        if len(arrived) == len(aligned):
            others = [arrival for arrival in arrived if arrival[2] != rank]
            seconds[rank] += sum(min(elapsed_ns, last - began) for began, elapsed_ns, _ in others) / 1e9
    return seconds


def _waits(spans: Spans) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Yield each wait inside a step: (step, index of the wait in the step), begin and length."""
    steps = np.flatnonzero(spans.kind == _STEP)
    begins = spans.began[steps]
    ends = begins + spans.elapsed_ns[steps]
    waits = np.flatnonzero(spans.kind == _WAIT)
    index = np.searchsorted(begins, spans.began[waits], side="right") - 1
    inside = (index >= 0) & (spans.began[waits] < ends[np.maximum(index, 0)]) if len(steps) else np.zeros(0, bool)
    first = spans.n_steps - len(steps)
    number: dict[int, int] = {}
    for at, step in zip(waits[inside].tolist(), index[inside].tolist(), strict=True) if len(steps) else ():
        number[step] = number.get(step, -1) + 1
        yield (first + step, number[step]), int(spans.began[at]), int(spans.elapsed_ns[at])


def _names(trace: RankTrace) -> Iterator[str]:
    """Yield events that name a rank and its threads, and define their order."""

    def named(kind: str, thread: int, **arguments: object) -> str:
        return json.dumps({"name": kind, "ph": "M", "pid": trace.rank, "tid": thread, "args": arguments})

    yield named("process_name", 0, name=f"rank {trace.rank}, {trace.role}, on {trace.host}")
    yield named("process_sort_index", 0, sort_index=trace.rank)
    for thread, (name, _, _) in enumerate(trace.tracks):
        yield named("thread_name", thread, name=name)
        yield named("thread_sort_index", thread, sort_index=thread)


def _events(rank: int, thread: int, spans: Spans, origin: int) -> Iterator[str]:
    """Yield spans as complete events with times in microseconds since ``origin``; steps with their number."""
    step = spans.n_steps - int((spans.kind == _STEP).sum())
    where = f'"ph": "X", "pid": {rank}, "tid": {thread}'
    rows = zip((spans.began - origin).tolist(), spans.elapsed_ns.tolist(), spans.kind.tolist(), strict=True)
    for began, elapsed_ns, kind in rows:
        number = ""
        if kind == _STEP:
            step += 1
            number = f', "args": {{"step": {step}}}'
        yield f'{{"name": "{KINDS[kind]}", {where}, "ts": {began / 1e3:.3f}, "dur": {elapsed_ns / 1e3:.3f}{number}}}'
