"""The timeline: the engine's activity for each tensor, as a file that chrome://tracing and Perfetto show."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from .execution import Operation
from .request import Handle

_BUFFERED = 1000  # number of events that are written together


class Timeline:
    """A timeline that can be started and stopped. Only the first rank records. Every method is local."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._mark_cycles = False
        self._start = 0.0
        self._rows: dict[tuple[str, str], int] = {}
        self._events: list[dict[str, Any]] = []
        self._any = False

    def start(self, path: str, mark_cycles: bool) -> None:
        """Begin a new file; complete a file that is being written.

        Raises:
            OSError: The file cannot be written.
        """
        self.stop()
        with self._lock:
            self._file = Path(path).open("w")  # noqa: SIM115
            self._mark_cycles, self._rows, self._any = mark_cycles, {}, False
            self._start = time.perf_counter()
            self._file.write("[\n")
            began = int(1e6 * time.time())
            self._events = [
                _event("M", 0, 0, "process_name", {"name": "engine", "start_time_since_epoch_in_micros": began})
            ]

    def stop(self) -> None:
        """Complete the file, if one is being written."""
        with self._lock:
            if self._file is not None:
                self._write()
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def cycle(self) -> None:
        """Record that a negotiation is complete."""
        if self._file is not None and self._mark_cycles:
            self._add(_event("i", self._now(), 0, "CYCLE_START", {}))

    def began(self, group: Sequence[Operation]) -> None:
        """Record that all ranks have submitted operations, which are performed now."""
        if self._file is None:
            return
        now = self._now()
        for request, handle in group:
            if handle is not None:
                row = self._row(request.kind, request.name)
                kind = request.kind.upper()
                self._add(_event("B", self._since(handle.submitted), row, f"NEGOTIATE_{kind}", {}))
                self._add(_event("E", now, row, f"NEGOTIATE_{kind}", {}))
                self._add(_event("B", now, row, kind, {"operation": request.text, "fused": len(group)}))

    def ended(self, handle: Handle) -> None:
        """Record that an operation is complete."""
        if self._file is not None:
            request = handle.request
            self._add(_event("E", self._now(), self._row(request.kind, request.name), request.kind.upper(), {}))

    def _row(self, kind: str, name: str) -> int:
        row = self._rows.get((kind, name))
        if row is None:
            row = self._rows[kind, name] = len(self._rows) + 1
            self._add(_event("M", 0, row, "process_name", {"name": f"{kind}.{name or 'noname'}"}))
        return row

    def _now(self) -> float:
        return self._since(time.perf_counter())

    def _since(self, moment: float) -> float:
        return max(0.0, 1e6 * (moment - self._start))

    def _add(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._events.append(event)
            if len(self._events) >= _BUFFERED:
                self._write()

    def _write(self) -> None:
        if self._file is not None and self._events:
            self._file.write((",\n" if self._any else "") + ",\n".join(map(json.dumps, self._events)))
            self._file.flush()
            self._any = True
        self._events = []


def _event(phase: str, us: float, row: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": phase, "ts": round(us, 1), "pid": row, "name": name}
    if phase == "i":
        event["s"] = "g"
    if arguments:
        event["args"] = arguments
    return event
