"""The CPU cores that processes of this host may use."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable


def own_cores() -> frozenset[int]:
    """Return the cores to which this process is bound."""
    return frozenset(os.sched_getaffinity(0))


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
