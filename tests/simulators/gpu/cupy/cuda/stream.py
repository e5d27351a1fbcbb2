from __future__ import annotations

import itertools
import threading
from typing import Any

from . import current, schedule
from .graph import Graph
from .schedule import Operation

_here = threading.local()
_numbers = itertools.count(1)
_by_number: dict[int, Stream] = {}


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self._asked = self._done = 0
        self._device = current()

    def record(self, stream: Stream | None = None) -> None:
        self._asked += 1
        asked = self._asked
        stream = get_current_stream() if stream is None else stream
        assert not stream.is_capturing(), "an event is recorded in a capture"
        assert stream is Stream.null or stream.device_id == self._device, "the event is another GPU's"

        def note() -> None:
            self._done = asked

        stream.queue.put(Operation(note))

    def synchronize(self) -> None:
        assert not get_current_stream().is_capturing(), "the host waits during a capture"
        asked = self._asked
        schedule.until(lambda: self._done >= asked)

    @property
    def done(self) -> bool:
        return self._done >= self._asked


class Stream:
    null: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        self.queue, self.device_id, self.ptr = schedule.Queue(), current(), next(_numbers)
        _by_number[self.ptr] = self

    def __enter__(self) -> Stream:
        stack().append(self)
        return self

    def __exit__(self, *how: object) -> None:
        stack().pop()

    def synchronize(self) -> None:
        self.queue.drain()

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        asked = event._asked
        assert not self.is_capturing(), "a capture waits for an event"
        self.queue.put(Operation(lambda: None, lambda: event._done >= asked))

    def begin_capture(self, mode: int | None = None) -> None:
        assert get_current_stream() is self and self.queue.captured is None and mode is None
        self.queue.captured = []

    def end_capture(self) -> Graph:
        captured, self.queue.captured = self.queue.captured, None
        assert captured is not None
        return Graph(captured)

    def is_capturing(self) -> bool:
        return self.queue.captured is not None

    @property
    def done(self) -> bool:
        return not self.queue.waiting


def stack() -> list[Stream]:
    if not hasattr(_here, "streams"):
        _here.streams = []
    return _here.streams  # type: ignore[no-any-return]


def get_current_stream() -> Stream:
    streams = stack()
    return streams[-1] if streams else Stream.null


def by_number(number: int) -> Stream:
    return _by_number[number]


def submit(run: Any, ready: Any = None, stream: Stream | None = None) -> None:
    """Submit an operation to a stream; by default to the current stream of this thread."""
    stream = get_current_stream() if stream is None else stream
    assert stream is Stream.null or stream.device_id == current(), "the stream is another GPU's"
    stream.queue.put(Operation(run) if ready is None else Operation(run, ready))


Stream.null = Stream()
