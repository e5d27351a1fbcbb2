"""``metrics.jsonl``: one JSON object per line, readable by other programs during the run."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
_LINE_BYTES = 1 << 20  # upper limit of a line's length

# The keys that a run itself records, besides ``validation_NAME`` for metrics.
RECORDED = frozenset(
    "step time_s resumed restarts repeated_steps restart_s loss learning_rate examples_per_s step_s skipped_steps "
    "staleness_mean staleness_max staleness_histogram dropped moved_bytes internode_bytes saved_bytes workers "
    "device_memory grad_norm goodput spent".split()
)


class MetricsFile:
    """Appends measured values; chief only.

    Non-finite values are written as null, because JSON has no NaN. A line that cannot be written, for example on a full
    disk, is lost, and the run continues. The first of several lost lines is logged.

    Attributes:
        before_s: Seconds of training already recorded in the file; a resumed run continues from there.
        listeners: Called with the step and the values of every line.
        account: Returns values that lines with a loss, and without values, contain in addition; None if there are none.
    """

    def __init__(self, path: Path) -> None:
        self.before_s = 0.0
        self.listeners: list[Callable[[int, Mapping[str, Any]], None]] = []
        self.account: Callable[[], Mapping[str, Any]] | None = None
        if path.exists():
            self.before_s = _repair_end(path)
        self._path, self._file = path, path.open("ab", buffering=0)
        self._warned = False

    def write(self, step: int, time_s: float, measured: Mapping[str, Any]) -> None:
        """Write one line: the step, the seconds of training over all attempts, and the measured numbers or lists.

        Args:
            time_s: Seconds since this attempt began.
        """
        has_account = "learning_rate" in measured or not measured
        account = self.account() if has_account and self.account is not None else {}
        line = {"step": step, "time_s": round(self.before_s + time_s, 6), **_finite(dict(measured)), **account}
        self._append(json.dumps(line).encode() + b"\n")
        for listener in self.listeners:
            listener(step, measured)

    def _append(self, line: bytes) -> None:
        """Append a line; the file never ends with a part of a line."""
        try:
            size = os.fstat(self._file.fileno()).st_size
            if self._file.write(line) < len(line):
                os.ftruncate(self._file.fileno(), size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._warned = False
        except OSError as error:
            if not self._warned:
                self._warned = True
                _log.warning("%s cannot be written: %s; training continues", self._path, error.strerror)

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _repair_end(path: Path) -> float:
    """Remove an incomplete last line left by a killed run; return the last line's ``time_s``, or 0."""
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        start = file.seek(max(0, size - 2 * _LINE_BYTES))
        data = file.read()
        complete = data.rfind(b"\n") + 1
        if complete < len(data):
            file.truncate(start + complete)
    return _last(data[:complete], "time_s")


def read_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Return the valid lines of a file, or those in its ``last_bytes``; none if it cannot be read."""
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        if last_bytes is not None:
            file.seek(max(0, file.seek(0, 2) - last_bytes))
        lines += filter(None, map(parse_line, file))
    return lines


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the values of a line; None if it is not valid."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None


def last_step(path: Path) -> int:
    """Return the step of the last valid line of a file; 0 if there is none."""
    lines = read_lines(path, 2 * _LINE_BYTES)
    return int(lines[-1]["step"]) if lines else 0


def _last(data: bytes, key: str) -> float:
    """Return the number ``key`` of the last line that is valid and has it; 0 if there is none."""
    for line in reversed(data.splitlines()):
        try:
            return float(json.loads(line)[key])
        except (ValueError, KeyError, TypeError):
            continue
    return 0.0
