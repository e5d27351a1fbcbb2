"""Processes of this host, identified by process id and start time, because process ids are reused."""

from __future__ import annotations

import os
import time
from pathlib import Path


def pid_start(pid: int) -> str:
    """Return when a process started, in clock ticks; empty if there is no such process."""
    words = _stat(pid)
    return words[19] if len(words) > 19 else ""


def seconds_alive(pid: int) -> float:
    """Return how long a process has existed; 0 if there is no such process."""
    start = pid_start(pid)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(start) / os.sysconf("SC_CLK_TCK") if start else 0.0


def process_state(pid: int) -> str:
    """Return the letter of a process's state in /proc, such as ``R`` or ``T``; empty if there is no such process."""
    return "".join(_stat(pid)[:1])


def parent_of(pid: int) -> int:
    """Return the process id of a process's parent; 0 if there is no such process."""
    words = _stat(pid)
    return int(words[1]) if len(words) > 1 else 0


def is_alive(pid: int, start: str) -> bool:
    """Return whether the process with this id and start time is alive on this host."""
    words = _stat(pid)
    return len(words) > 19 and words[19] == start and words[0] not in "ZX"  # a zombie is not alive


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process's name."""
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
