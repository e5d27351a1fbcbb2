"""``metrics.jsonl``: one JSON object a line, for programs to read while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

_INFINITE = (float("inf"), -float("inf"))


class MetricsFile:
    """Appends what was measured; the chief's alone.

    A value that is not finite is written as null: JSON has no NaN.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, time_s: float, measured: Mapping[str, Any]) -> None:
        """One line: the step, seconds since the run began, and what was measured: numbers, or lists for JSON."""
        finite = {name: None if value != value or value in _INFINITE else value for name, value in measured.items()}
        self._file.write(json.dumps({"step": step, "time_s": round(time_s, 6), **finite}) + "\n")

    def close(self) -> None:
        self._file.close()
