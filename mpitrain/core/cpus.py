"""The CPU cores that processes of this host may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def own_cores() -> frozenset[int]:
    """Return the cores to which this process is bound."""
    return frozenset(os.sched_getaffinity(0))


def usable_cores() -> frozenset[int]:
    """Return the cores to which this process is bound, but at most as many as the quota of its control groups allows.

    Processes of one container, which are bound alike and share a quota, get the same cores.
    """
    cores = sorted(own_cores())
    return frozenset(cores[: max(1, int(min([len(cores), *_quotas(_own_groups())])))])


def _own_groups() -> list[tuple[str, str]]:
    """Return this process's control groups as (controllers, path); version 2 has no names of controllers."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    return [(controllers, path) for _, controllers, path in (line.split(":", 2) for line in lines)]


def _quotas(groups: Iterable[tuple[str, str]]) -> Iterator[float]:
    """Yield the quotas, in cores, of control groups and the groups that contain them; see ``cgroups(7)``."""
    for controllers, path in groups:
        if controllers and "cpu" not in controllers.split(","):
            continue
        for root in [_CGROUPS / controllers] if controllers else [_CGROUPS, _CGROUPS / "unified"]:
            group = root / path.lstrip("/")
            # In a container, the path may be that of the host: only the root exists.
            for folder in [group, *group.parents[: len(group.parts) - len(root.parts)]]:
                with contextlib.suppress(OSError, ValueError):
                    if controllers:
                        quota = [(folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
                    else:
                        quota = (folder / "cpu.max").read_text().split()
                    if (share := float(quota[0]) / float(quota[1])) > 0:  # negative, or "max", without a quota
                        yield share


def all_cores(of_processes: Iterable[Collection[int]]) -> int:
    """Return the number of cores that several processes of a host have together."""
    return len(set().union(*of_processes))


def share_of(cores: int, processes: int, own: Collection[int]) -> int:
    """Return how many threads a process should use: its share of the host's cores, at most those to which it is bound.

    Args:
        cores: The number of cores that all these processes have together.
        own: The cores of this process.
    """
    return max(1, min(cores // max(1, processes), len(own)))
