"""RPC by windows whose network delivers as late as MPI permits, and the last message first."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpitrain.comm.rpc import windows
from mpitrain.comm.rpc.interface import Routes, unpack
from mpitrain.core.layout import Array

SERVER, CLIENT = 0, 1
SIZE, RANGES = 20, [(2, 7), (11, 18)]
MESSAGE = np.dtype([("number", "i8")])


class Network:
    """The windows of two ranks, and what is on its way between them."""

    def __init__(self) -> None:
        self.memories: dict[int, Array] = {}
        self.looks: list[Callable[[], object]] = []  # called after each delivery
        self._pending: list[tuple[int, int, Array]] = []

    def of(self, rank: int) -> Any:
        """Return what a rank sees of MPI."""

        def create(memory: Array, unit: int, info: object, comm: object) -> Any:
            assert unit == 1
            self.memories[rank] = memory
            return SimpleNamespace(Lock_all=lambda flag: None, Put=self._put, Flush=self._flush, Sync=lambda: None)

        return SimpleNamespace(Win=SimpleNamespace(Create=create), INFO_NULL=None, MODE_NOCHECK=0)

    def _put(self, sent: list[Any], rank: int, place: list[Any]) -> None:
        array, at = sent[0], place[0]
        assert place[1] == array.size
        self._pending.append((rank, at, array.reshape(-1).view(np.uint8)))

    def _flush(self, rank: int) -> None:
        for to, at, values in reversed([each for each in self._pending if each[0] == rank]):
            self.memories[to][at : at + len(values)] = values
            for look in self.looks:
                look()
        self._pending = [each for each in self._pending if each[0] != rank]


def routes(rank: int) -> Routes:
    comm: Any = SimpleNamespace(rank=rank, size=2, Iprobe=lambda: False)
    return Routes(comm, {SERVER: [CLIENT]}, {SERVER: RANGES}, SIZE, np.dtype(np.float32), n_extra=3)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[Network, windows.WindowServer, windows.WindowClient]:
    network = Network()
    monkeypatch.setattr(windows, "mpi_type", lambda dtype: dtype)
    monkeypatch.setattr(windows, "MPI", network.of(SERVER))
    server = windows.WindowServer(routes(SERVER))
    monkeypatch.setattr(windows, "MPI", network.of(CLIENT))
    client = windows.WindowClient(routes(CLIENT))
    return network, server, client


def test_a_request_that_is_seen_has_its_vector(
    ends: tuple[Network, windows.WindowServer, windows.WindowClient],
) -> None:
    network, server, client = ends
    seen: list[tuple[int, int, int, list[float]]] = []

    def look() -> None:
        for rank, kind, message in server.requests():
            seen.append((rank, kind, int(unpack(message, MESSAGE)["number"]), server.request_vector(rank).tolist()))

    network.looks.append(look)
    for step in range(3):
        vector = np.arange(SIZE, dtype=np.float32) + 100 * step
        client.send_request(SERVER, 5, np.array((step,), MESSAGE), vector)
        assert seen.pop() == (CLIENT, 5, step, [*vector[2:7], *vector[11:18]]) and not seen
        assert not server.is_receiving()


def test_a_reply_that_is_seen_has_its_vector_and_words(
    ends: tuple[Network, windows.WindowServer, windows.WindowClient],
) -> None:
    network, server, client = ends
    seen: list[tuple[int, list[float], list[int]]] = []
    numbers: list[int] = []

    def look() -> None:
        if numbers and windows.has_arrived(client.window.headers, 0, numbers[0]):
            numbers.clear()
            message = client.wait_reply(SERVER)
            seen.append((int(unpack(message, MESSAGE)["number"]), client.vector.tolist(), client.extra.tolist()))

    network.looks.append(look)
    for step in range(3):
        client.send_request(SERVER, 1)
        assert [kind for _, kind, _ in server.requests()] == [1]
        vector, extra = np.arange(SIZE, dtype=np.float32) - 50 * step, np.arange(3) + step
        numbers.append(step + 1)
        server.send_reply(CLIENT, np.array((step,), MESSAGE), vector, extra)
        expected = np.zeros(SIZE, np.float32)
        for lo, hi in RANGES:
            expected[lo:hi] = vector[lo:hi]
        assert seen.pop() == (step, expected.tolist(), extra.tolist()) and not seen
