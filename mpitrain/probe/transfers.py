"""Latency and bandwidth between ranks, with the messages that training sends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from ..comm.cluster import Cluster
from ..comm.mpi import MPI
from ..core.layout import Array
from ..predict.measurements import LinkTimes
from .turns import await_all

_TAG = 77
_PINGS, _POSTED = 200, 50
_PART, _PIECES = 1 << 20, 4  # number of bytes that are sent at once, and the number of messages that carry them
_SHORT, _LONG = 4, 256  # number of such parts in a transfer
_PAUSE_S = 0.3  # pause after which a shaped link allows a burst again
_LONGEST_S = 2.0
_SHAPED = 2.0  # a link is shaped if its first messages take less than 1 / _SHAPED of the time of later ones
_LOCAL = 64 << 20  # bytes
_Result = TypeVar("_Result")


def measure_links(cluster: Cluster) -> tuple[LinkTimes | None, LinkTimes | None]:
    """Return the times of transfers within a node, and between nodes; None in place of times that no ranks can measure.

    Collective over all ranks. Pairs within a node are its first two ranks. Pairs between nodes are ranks with the same
    index on the first two nodes: first one pair, then all.
    """
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(cluster.node_of):
        nodes.setdefault(node, []).append(rank)
    first, *others = nodes.values()
    cpu_s_per_byte = cluster.comm.bcast(_cpu_s_per_byte() if cluster.rank == 0 else 0.0)
    within = next((ranks[:2] for ranks in nodes.values() if len(ranks) > 1), None)
    of_node = None if within is None else _measure(cluster, [(within[0], within[1])], cpu_s_per_byte)
    between = _measure(cluster, list(zip(first, others[0], strict=False)), cpu_s_per_byte) if others else None
    return of_node, between


def _measure(cluster: Cluster, pairs: list[tuple[int, int]], cpu_s_per_byte: float) -> LinkTimes:
    """Return the times of the first pair, and the rate of all pairs at once. Collective over all ranks."""
    latency = float(
        np.mean(_on_pairs(cluster, pairs[:1], lambda comm, other: one_way_s(comm, other, np.zeros(1), _PINGS)))
    )
    message = float(np.mean(_on_pairs(cluster, pairs[:1], _message_s)))
    rate, burst = _rate(cluster, pairs[:1])
    node_rate = _rate(cluster, pairs)[0] if len(pairs) > 1 else rate
    return LinkTimes(latency, message, rate, node_rate, burst, cpu_s_per_byte)


def _on_pairs(
    cluster: Cluster, pairs: list[tuple[int, int]], measure: Callable[[MPI.Intracomm, int], _Result]
) -> list[_Result]:
    """Return the results of ``measure(comm, other)`` on the ranks of all pairs. Collective over all ranks."""
    other = {a: b for pair in pairs for a, b in (pair, pair[::-1])}.get(cluster.rank)
    result = None if other is None else measure(cluster.comm, other)
    await_all(cluster.comm)
    return [one for one in cluster.comm.allgather(result) if one is not None]


def one_way_s(comm: MPI.Intracomm, other: int, data: Array, rounds: int) -> float:
    """Return the median time of a message in one direction, without the first quarter of the rounds."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        if comm.rank < other:
            comm.Send(data, other, _TAG)
            comm.Recv(data, other, _TAG)
        else:
            comm.Recv(data, other, _TAG)
            comm.Send(data, other, _TAG)
        times.append(time.perf_counter() - began)
    return float(np.median(times[rounds // 4 :])) / 2


def _message_s(comm: MPI.Intracomm, other: int) -> float:
    """Return the time for one small message in each direction if many are posted at once."""
    sent, received = np.zeros(_POSTED), np.zeros(_POSTED)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        requests = [comm.Irecv(received[i : i + 1], other, _TAG) for i in range(_POSTED)]
        requests += [comm.Isend(sent[i : i + 1], other, _TAG) for i in range(_POSTED)]
        MPI.Request.Waitall(requests)
        times.append((time.perf_counter() - began) / _POSTED)
    return float(np.median(times))


def _rate(cluster: Cluster, pairs: list[tuple[int, int]]) -> tuple[float, float]:
    """Return bytes/s of all pairs together in each direction, and the bytes sent faster at first. Collective."""

    def exchange(count: int) -> list[Array]:
        return _on_pairs(cluster, pairs, lambda comm, other: _exchange(comm, other, count))

    exchange(_SHORT)
    slowest = max(float(times.sum()) for times in exchange(_SHORT))
    count = int(np.clip(_LONGEST_S / (slowest / _SHORT), 2 * _SHORT, _LONG))
    time.sleep(_PAUSE_S)
    times = np.max(exchange(count), axis=0)
    early, late = times[:1], times[count // 2 :]
    rate = len(pairs) * _PART * len(late) / late.sum()
    is_shaped = np.mean(early) * _SHAPED < np.median(late)
    burst = len(pairs) * _PART * count - rate * float(times.sum()) if is_shaped else 0.0
    return float(rate), max(0.0, float(burst))


def _exchange(comm: MPI.Intracomm, other: int, count: int) -> Array:
    """Exchange ``count`` parts in both directions; return their seconds."""
    sent, received, times = np.zeros(_PART, np.uint8), np.zeros(_PART, np.uint8), np.zeros(count)
    for i in range(count):
        began = time.perf_counter()
        requests = [comm.Irecv(part, other, _TAG) for part in np.split(received, _PIECES)]
        requests += [comm.Isend(part, other, _TAG) for part in np.split(sent, _PIECES)]
        MPI.Request.Waitall(requests)
        times[i] = time.perf_counter() - began
    return times


def _cpu_s_per_byte() -> float:
    """Return the processor time to send and receive one byte by TCP, measured on this host. Local."""
    listener = socket.create_server(("127.0.0.1", 0))
    sent: list[float] = []

    def send() -> None:
        data = bytes(_PART)
        with socket.create_connection(listener.getsockname()) as connection:
            began = time.thread_time()
            for _ in range(_LOCAL // _PART):
                connection.sendall(data)
            sent.append(time.thread_time() - began)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    connection, _ = listener.accept()
    buffer, received = bytearray(_PART), 0
    with connection, listener:
        began = time.thread_time()
        while count := connection.recv_into(buffer):
            received += count
        elapsed_s = time.thread_time() - began
    thread.join()
    return (sent[0] + elapsed_s) / received
