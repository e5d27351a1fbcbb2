"""The CPU cores that processes of this host may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .words import counted

_CGROUPS = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")
SHOW_BINDING = "MPITRAIN_SHOW_BINDING"  # set if the table of ranks is printed before they work


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


@dataclass(frozen=True)
class Binding:
    """Where a process may run.

    Attributes:
        cores: The numbers of its cores.
        numa_nodes: The NUMA nodes of these cores.
        host_cores: The number of cores of its host.
    """

    cores: tuple[int, ...]
    numa_nodes: tuple[int, ...] = ()
    host_cores: int = 0

    @classmethod
    def own(cls) -> Binding:
        """Return that of this process."""
        cores = usable_cores()
        nodes = sorted(int(path.name[4:]) for path in _NODES.glob("node[0-9]*") if cores & _cores_of(path))
        return cls(tuple(sorted(cores)), tuple(nodes), os.cpu_count() or len(cores))

    def columns(self) -> tuple[str, str]:
        """Return cores and NUMA nodes as text, such as ``0-3,8``; nodes are ``-`` where the kernel names none."""
        return _ranges(self.cores), _ranges(self.numa_nodes) or "-"


def crowded(hosts: Sequence[str], bindings: Sequence[Binding]) -> list[str]:
    """Describe each host whose ranks share fewer cores than ranks, although the host has more cores."""
    found = []
    for host in dict.fromkeys(hosts):
        own = [binding for name, binding in zip(hosts, bindings, strict=True) if name == host]
        cores = set().union(*(binding.cores for binding in own))
        if len(cores) < min(len(own), own[0].host_cores):
            found.append(f"{len(own)} ranks on {host} share {counted(len(cores), 'core')} of {own[0].host_cores}")
    return found


def crowd_warnings(hosts: Sequence[str], bindings: Sequence[Binding]) -> list[str]:
    """Return a warning for each host that ``crowded`` describes."""
    advice = "request more cores, or pass --launcher-args '--bind-to none'"
    return [f"WARNING: {description}; {advice}" for description in crowded(hosts, bindings)]


def _cores_of(node: Path) -> set[int]:
    """Return the cores of a NUMA node; empty if the kernel does not say."""
    cores = set[int]()
    with contextlib.suppress(OSError, ValueError):
        for part in (node / "cpulist").read_text().strip().split(","):
            first, _, last = part.partition("-")
            cores |= {*range(int(first), int(last or first) + 1)}
    return cores


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as ``0-3,8``."""
    parts = list[list[int]]()
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)


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
