"""Exchanges between nodes: the order of their parts, and what is computed from their times."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpitrain.core.layout import Layout
from mpitrain.core.ranges import Bucket
from mpitrain.predict.measurements import ExchangeTimes
from mpitrain.probe import exchanges
from mpitrain.probe.exchanges import measure_exchanges

from ...simulators.simulated_mpi import Comm, World, simulate

BUCKETS = [Bucket(60, 100), Bucket(20, 60), Bucket(0, 20)]
LAYOUT = Layout.pack([("weight", (400, 300), "param"), ("bias", (300,), "param")])


class Sums:
    """Records the calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


def plan_of(layout: Layout = LAYOUT) -> Any:
    return SimpleNamespace(
        layout=layout,
        buckets=BUCKETS,
        dtype=np.dtype(np.float32),
        nbytes=4 * layout.size,
        config=SimpleNamespace(
            parallel=SimpleNamespace(shared_memory=True),
            training=SimpleNamespace(seed=0),
            servers=SimpleNamespace(one_sided=False),
        ),
    )


def test_sums_begin_when_their_gradients_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, grads = Sums(), np.zeros(100)

    def gradient(ready: Any) -> Any:
        for start in (80, 60, 10):
            sums.calls.append(start)
            ready(start)
        return np.arange(100.0)

    def repeat(comm: Any, alone: Any, both: Any) -> list[float]:
        alone()
        sums.calls.clear()
        both()
        return [3.0, 8.0]

    monkeypatch.setattr(exchanges, "_repeat", repeat)
    hierarchy: Any = SimpleNamespace(comm=None)
    assert exchanges._median_exchange(hierarchy, sums, plan_of(), grads, gradient) == 5.0  # type: ignore[arg-type]
    assert grads.tolist() == list(range(100))
    progress = ("progress",)
    expected = [80, progress, 60, ("start", 0), progress, 10, ("start", 1), progress, ("start", 2), progress]
    for index in range(3):
        expected += [("finish", index), ("share", index)]
    expected += [("complete_all",), ("free",)]
    assert sums.calls == expected


def test_a_sum_takes_no_negative_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "_repeat", lambda *arguments: [8.0, 3.0])
    arguments: Any = (SimpleNamespace(comm=None), Sums(), plan_of(), None, None)
    assert exchanges._median_exchange(*arguments) == 0.0


@pytest.mark.parametrize(
    ("second_s", "repetitions"), [(100.0, 4), (0.1, 21), (1e-9, 61)], ids=["fewest", "some", "most"]
)
def test_the_slowest_actions_are_repeated_in_turns(
    monkeypatch: pytest.MonkeyPatch, second_s: float, repetitions: int
) -> None:
    performed: list[str] = []

    def slowest(comm: Any, action: Any) -> float:
        action()
        repetition = (len(performed) - 1) // 2
        if not repetition:
            return 1e6  # it has compiled kernels
        return repetition * second_s * (1 if performed[-1] == "a" else 2) / 3

    monkeypatch.setattr(exchanges, "_slowest", slowest)
    actions = [lambda: performed.append("a"), lambda: performed.append("b")]
    found = exchanges._repeat(None, *actions)  # type: ignore[arg-type]
    assert performed == ["a", "b"] * repetitions
    assert found == pytest.approx([second_s / 3 * repetitions / 2, 2 * second_s / 3 * repetitions / 2])


def test_the_time_is_that_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = threading.local()
    monkeypatch.setattr(exchanges, "time", SimpleNamespace(perf_counter=lambda: getattr(clock, "now", 0.0)))
    simulate(monkeypatch, [0, 1, 2])

    def program(comm: Comm) -> float:
        def action() -> None:
            clock.now = [2.0, 7.0, 1.0][comm.rank]

        return exchanges._slowest(comm, action)  # type: ignore[arg-type]

    assert World([0, 1, 2]).run(program) == [7.0] * 3


@pytest.mark.parametrize("low_rank", [False, True])
def test_the_time_of_a_byte_that_a_node_sends(monkeypatch: pytest.MonkeyPatch, low_rank: bool) -> None:
    kinds: list[str] = []

    def median_exchange(hierarchy: Any, sums: Any, *others: Any) -> float:
        kinds.append(sums)
        return 6.0 if sums == "divided" else 2.0

    hierarchy = SimpleNamespace(
        n_nodes=4,
        node=SimpleNamespace(size=2, rank=1),
        shared=SimpleNamespace(allocate=lambda shape, dtype: np.zeros(shape, dtype)),
        free=lambda: kinds.append("freed"),
    )
    monkeypatch.setattr(exchanges, "hierarchy_of", lambda cluster, nbytes, share: hierarchy)
    monkeypatch.setattr(exchanges, "sum_order", lambda hierarchy, leaves: None)
    monkeypatch.setattr(exchanges, "DividedSums", lambda *arguments: "divided")
    monkeypatch.setattr(exchanges, "PowerSums", lambda *arguments: "low rank")
    monkeypatch.setattr(exchanges, "_median_exchange", median_exchange)
    monkeypatch.setattr(exchanges, "_measure_requests", lambda cluster, plan: (0.5, 0.1, 0.2))
    layout = LAYOUT if low_rank else Layout.pack([("bias", (1000,), "param")])
    plan = plan_of(layout)
    cluster: Any = SimpleNamespace(n_nodes=4, node=SimpleNamespace(size=2))
    found = measure_exchanges(cluster, plan, lambda ready: np.zeros(layout.size))
    # A node sends 3/4 of the vector to the owners of the other ranges, and its own quarter to 3 nodes.
    assert found == ExchangeTimes(6.0 / (1.5 * plan.nbytes), 2.0 if low_rank else 0.0, 0.5, 0.1, 0.2)
    assert kinds == ["divided", *["low rank"] * low_rank, "freed"]
    cluster.n_nodes = 1
    assert measure_exchanges(cluster, plan, lambda ready: np.zeros(1)) is None


class Wire:
    """Requests of one client and their replies."""

    def __init__(self) -> None:
        self.sent: queue.Queue[tuple[int, Any]] = queue.Queue()
        self.replies: queue.Queue[Any] = queue.Queue()
        self.requests_of: list[tuple[int, Any]] = []

    # The client's side.

    def send_request(self, server: int, kind: int, vector: Any = None) -> None:
        self.requests_of.append((kind, vector))
        self.sent.put((kind, vector))

    def wait_reply(self, server: int) -> None:
        self.requests_of[-1] += (self.replies.get(timeout=20),)

    # The server's side.

    def requests(self) -> Any:
        yield from [(5, *self.sent.get(timeout=20))]

    def send_reply(self, client: int, vector: Any = None) -> None:
        assert client == 5
        self.replies.put(vector)

    def is_receiving(self) -> bool:
        return True


def test_a_server_answers_until_the_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "_SECONDS", 0.0)
    wire, params, grads = Wire(), np.ones(3), np.zeros(3)
    server = threading.Thread(target=exchanges._serve, args=(wire, params), daemon=True)
    server.start()
    medians = exchanges._send_requests(wire, grads)  # type: ignore[arg-type]
    server.join(20)
    assert not server.is_alive() and len(medians) == 3
    kinds = [kind for kind, _, _ in wire.requests_of]
    assert kinds == [0] * 3 + [1] * 3 + [2] * 3 + [3]  # ping, push, pull, end
    assert all((sent is grads) == (kind == 1) for kind, sent, _ in wire.requests_of)
    assert all((reply is params) == (kind == 2) for kind, _, reply in wire.requests_of)


@pytest.mark.parametrize("node_of", [[0, 0, 2, 2], [0, 1, 1]], ids=str)
def test_the_first_ranks_of_two_nodes_measure_requests(monkeypatch: pytest.MonkeyPatch, node_of: list[int]) -> None:
    world = simulate(monkeypatch, node_of)
    freed: list[str] = []
    client = node_of.index(sorted(set(node_of))[1])

    def end(name: str) -> Any:
        return SimpleNamespace(free=lambda: freed.append(name))

    def open_rpc(routes: Any, one_sided: bool) -> Any:
        rank = world.here
        return end("client") if rank == client else None, end("server") if rank == 0 else None

    monkeypatch.setattr(exchanges, "Routes", lambda *arguments: arguments)
    monkeypatch.setattr(exchanges, "open_rpc", open_rpc)
    monkeypatch.setattr(exchanges, "_serve", lambda server, vector: None)
    monkeypatch.setattr(exchanges, "_send_requests", lambda rpc, vector: (1.0, 9.0, 0.5))
    plan = plan_of()

    def program(comm: Comm) -> Any:
        cluster: Any = SimpleNamespace(comm=comm, rank=comm.rank, node_of=node_of)
        return exchanges._measure_requests(cluster, plan)

    assert world.run(program) == [(1.0, 8.0 / plan.nbytes, 0.0)] * len(node_of)
    assert sorted(freed) == ["client", "server"]
