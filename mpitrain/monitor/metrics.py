"""``metrics.jsonl``: one JSON object a line, for programs to read while the run goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

_LINE_BYTES = 1 << 20  # no line is longer


class MetricsFile:
    """Appends what was measured; the chief's alone.

    A value that is not finite is written as null: JSON has no NaN.

    Attributes:
        before_s: Seconds of training that the file tells of already; a run that is resumed goes on from there.
        also: Given the step and the values of every line too.
    """

    def __init__(self, path: Path) -> None:
        self.before_s = 0.0
        self.also: Callable[[int, Mapping[str, Any]], None] | None = None
        if path.exists():
            self.before_s = _repair_end(path)
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, time_s: float, measured: Mapping[str, Any]) -> None:
        """One line: the step, seconds since this attempt began, and what was measured: numbers, or lists for JSON."""
        line = {"step": step, "time_s": round(self.before_s + time_s, 6), **_finite(dict(measured))}
        self._file.write(json.dumps(line) + "\n")
        if self.also is not None:
            self.also(step, measured)

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _repair_end(path: Path) -> float:
    """Cut off a line that a killed run left half written; return the last line's ``time_s``, or 0."""
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        start = file.seek(max(0, size - 2 * _LINE_BYTES))
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            file.truncate(start + whole)
    for line in reversed(data[:whole].splitlines()):
        try:
            return float(json.loads(line)["time_s"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0.0
