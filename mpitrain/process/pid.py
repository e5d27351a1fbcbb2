"""Processes of this machine, by number and start time: a number alone may be reused."""

from __future__ import annotations

from pathlib import Path


def pid_start(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty where there is none."""
    words = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return words[19] if len(words) > 19 else ""


def is_alive(pid: int, start: str) -> bool:
    """Whether a process of this machine with that number and start is there."""
    words = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return len(words) > 19 and words[19] == start and words[0] not in "ZX"  # a zombie is not alive


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
