"""Detection of other programs that use the CPU during a measurement. Linux only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

MOST = 0.04  # of one core: the CPU time that other programs may use during a measurement
_SAMPLE_S, _LONGEST_WAIT_S, _TRIES = 0.5, 100.0, 3
_TICKS = os.sysconf("SC_CLK_TCK")
_Result = TypeVar("_Result")


def undisturbed(action: Callable[[], _Result], namespaces: str) -> _Result:
    """Return the result of ``action``; repeat it up to twice if other programs used the CPU meanwhile.

    Each call first waits up to 100 s for an idle CPU.

    Args:
        namespaces: Prefix of the names of the network namespaces whose processes belong to the measurement.
    """
    for attempt in range(_TRIES):
        _await_idle(namespaces)
        began, before = time.monotonic(), _seconds_of_others(namespaces)
        result = action()
        share = _used(before, _seconds_of_others(namespaces)) / (time.monotonic() - began)
        if share <= MOST:
            break
        print(f"(others used {share:.0%} of a core{', repeated' * (attempt < _TRIES - 1)})", flush=True)
    return result


def _await_idle(namespaces: str) -> None:
    until = time.monotonic() + _LONGEST_WAIT_S
    while time.monotonic() < until:
        before = _seconds_of_others(namespaces)
        time.sleep(_SAMPLE_S)
        if _used(before, _seconds_of_others(namespaces)) <= MOST * _SAMPLE_S:
            return


def _used(before: dict[int, float], after: dict[int, float]) -> float:
    return sum(max(0.0, seconds - before.get(process, 0.0)) for process, seconds in after.items())


def _seconds_of_others(namespaces: str) -> dict[int, float]:
    """Return, by process id, the CPU seconds of each foreign process and of its ended children."""
    own = {path.stat().st_ino for path in Path("/run/netns").glob(f"{namespaces}*")}
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            in_own = (path / "ns" / "net").stat().st_ino in own
        except OSError:
            continue  # the process has ended
        process = int(path.name)
        parents[process] = int(fields[1])
        if not in_own:
            seconds[process] = sum(map(int, fields[11:15])) / _TICKS
    return {process: used for process, used in seconds.items() if not _descends(process, parents)}


def _descends(process: int, parents: dict[int, int]) -> bool:
    """Return whether a process is this one, one of its ancestors or descendants, or a thread of the kernel."""
    ancestors, at = {os.getpid()}, os.getpid()
    while at in parents:
        at = parents[at]
        ancestors.add(at)
    if process in ancestors or parents[process] == 2:
        return True
    while process in parents:
        if process == os.getpid():
            return True
        process = parents[process]
    return False
