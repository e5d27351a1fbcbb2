"""Check a host before ranks are started on it again; run on the host as a script, with only the standard library.

    host_check.py NOW [HOST]

NOW is the time of the host that asks, in seconds since the epoch. HOST is the name of a host that has failed twice. If the host should not be used, the reason is the
last line on standard error, and the exit status is 1.
"""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

_LEAST_DISK_BYTES = 50 << 20
_LEAST_MEMORY = 0.02  # share of the host's memory
_MOST_CLOCK_S = 60.0


def problem(now: float, failed: str = "") -> str:
    """Return why the host should not be used; empty if it may be.

    Args:
        now: The time of the host that asks.
        failed: The name of a host on which ranks were killed in two attempts of the run, and on no other host.
    """
    if socket.gethostname() == failed:
        return "a signal has killed ranks on it in two attempts, and on no other host"
    folder, memory = tempfile.gettempdir(), _memory()
    if (free := shutil.disk_usage(folder).free) < _LEAST_DISK_BYTES:
        return f"its temporary directory {folder} has {free >> 20} MiB left"
    if memory and memory["MemAvailable"] < _LEAST_MEMORY * memory["MemTotal"]:
        return f"it has {memory['MemAvailable'] >> 10} MiB of free memory"
    if abs(ahead_s := time.time() - now) > _MOST_CLOCK_S:
        return f"its clock is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}"
    return ""


def _memory() -> dict[str, int]:
    """Return the sizes in KiB in /proc/meminfo; none if it does not exist."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


if __name__ == "__main__":
    sys.exit(problem(float(sys.argv[1]), *sys.argv[2:]) or 0)
