"""Offsets between the ranks' clocks, measured with ping-pong messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns, time_ns

import numpy as np

from .mpi import MPI

ROUNDS = 32


def measure(
    comm: MPI.Intracomm, rounds: int = ROUNDS, clock: Callable[[], int] = perf_counter_ns
) -> tuple[int, int, int]:
    """Measure the offset from this rank's clock to rank 0's. Collective over ``comm``.

    Returns:
        In nanoseconds: the time of the measurement on this rank's clock, the offset to add, and its uncertainty.
    """
    word = np.zeros(1, np.int64)
    if comm.rank == 0:
        for other in range(1, comm.size):
            for _ in range(rounds):
                comm.Recv(word, source=other)
                word[0] = clock()
                comm.Send(word, dest=other)
        return clock(), 0, 0
    trips = []
    for _ in range(rounds):
        sent = clock()
        comm.Send(word, dest=0)
        comm.Recv(word, source=0)
        trips.append((sent, int(word[0]), clock()))
    return best_offset(trips)


def measure_wall(comm: MPI.Intracomm) -> tuple[float, float]:
    """Return the seconds by which this rank's wall clock is behind rank 0's, and the uncertainty.

    Collective over ``comm``.
    """
    _, behind, uncertain = measure(comm, clock=time_ns)
    return behind / 1e9, uncertain / 1e9


def best_offset(trips: Sequence[tuple[int, int, int]]) -> tuple[int, int, int]:
    """Return the offset given by the shortest round trip, in the form of ``measure``.

    The reply was sent at an unknown time between sending and receiving. Assuming the middle gives an error of at most
    half the round trip (Cristian 1989, "Probabilistic clock synchronization").

    Args:
        trips: (sent, answered on the other clock, received), nanoseconds.
    """
    sent, answered, received = min(trips, key=lambda trip: trip[2] - trip[0])
    middle = (sent + received) // 2
    return received, answered - middle, (received - sent + 1) // 2
