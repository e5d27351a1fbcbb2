"""The store that rank 0 opens, and the address at which the other ranks reach it."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mpitrain.backend import rendezvous as module  # noqa: E402
from mpitrain.errors import LaunchError  # noqa: E402

from ...simulators.simulated_mpi import Comm, simulate  # noqa: E402

UNUSED = "127.255.255.254"  # an address of this host at which nothing listens


@pytest.mark.parametrize("node_of", [(0,), (0, 0, 0), (0, 1)], ids=str)
def test_all_ranks_get_one_store(monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...]) -> None:
    opened: list[tuple[Any, ...]] = []

    class Store:
        """Records its arguments."""

        port = 4711

        def __init__(self, *arguments: Any, is_master: bool, **options: Any) -> None:
            opened.append((*arguments, is_master))

    world = simulate(monkeypatch, node_of)
    monkeypatch.setattr(module, "start", lambda: module.MPI.COMM_WORLD)
    monkeypatch.setattr(torch.distributed, "TCPStore", Store)
    monkeypatch.setattr(module, "own_addresses", lambda: ["10.0.0.1"])
    asked: list[list[str]] = []

    def reachable(addresses: list[str], port: int) -> str:
        asked.append(addresses)
        return addresses[-1]

    monkeypatch.setattr(module, "_reachable", reachable)
    size = len(node_of)

    def program(comm: Comm) -> tuple[int, int]:
        _, rank, ranks = next(module.rendezvous("mpitrain://", timedelta(seconds=9)))
        return rank, ranks

    assert world.run(program) == [(rank, size) for rank in range(size)]
    assert opened[0] == ("127.0.0.1", 0, size, True)
    host = "127.0.0.1" if len(set(node_of)) == 1 else "10.0.0.1"
    assert opened[1:] == [(host, 4711, size, False)] * (size - 1)
    assert all(len(addresses) == (1 if host == "127.0.0.1" else 2) for addresses in asked)


def test_the_first_address_that_answers_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert module._reachable([UNUSED, "127.0.0.1", "127.0.0.2"], port) == "127.0.0.1"
    with pytest.raises(LaunchError, match=f"127.0.0.1.*{port}"):
        module._reachable([UNUSED, "127.0.0.1"], port)
