"""Let ranks measure one at a time or all at once; ranks that wait do not use their cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from ..comm.cluster import Cluster
from ..comm.mpi import MPI
from ..core import activity

_POLL_S = 1e-3
_LEAST = 3  # number of repetitions
_Result = TypeVar("_Result")


def await_all(comm: MPI.Intracomm) -> None:
    """Wait until all ranks of ``comm`` have called this, without using a core. Collective over ``comm``."""
    barrier = comm.Ibarrier()
    with activity.waiting():
        while not barrier.Test():
            time.sleep(_POLL_S)


def one_at_a_time(cluster: Cluster, measure: Callable[[], _Result]) -> _Result:
    """Return this rank's result of ``measure``, which runs on one rank after the other. Collective over all ranks."""
    result: _Result | None = None
    for rank in range(cluster.size):
        if rank == cluster.rank:
            result = measure()
        await_all(cluster.comm)
    assert result is not None
    return result


def all_at_once(cluster: Cluster, measure: Callable[[], _Result]) -> _Result:
    """Return this rank's result of ``measure``, which begins on all ranks at once. Collective over all ranks."""
    cluster.comm.Barrier()
    result = measure()
    await_all(cluster.comm)
    return result


def median_over_ranks(comm: MPI.Intracomm, seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the median over the ranks of each of these numbers. Collective over ``comm``."""
    return tuple(np.median(comm.allgather(list(seconds)), axis=0).tolist())


def median_of_ranks(comm: MPI.Intracomm, value: float) -> float:
    """Return the median over the ranks. Collective over ``comm``."""
    return float(np.median(comm.allgather(value)))


def median_s(action: Callable[[], object], seconds: float) -> float:
    """Return the median time of an action that is repeated for this number of seconds. Local."""
    times: list[float] = []
    action()
    until = time.perf_counter() + seconds
    while len(times) < _LEAST or time.perf_counter() < until:
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return float(np.median(times))
