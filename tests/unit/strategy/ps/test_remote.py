"""A worker's calls of a server on another node, over a connection in memory: as if the shard were on its own node."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpitrain import optim
from mpitrain.comm.backoff import Backoff
from mpitrain.comm.rpc import EMPTY
from mpitrain.comm.rpc.interface import MESSAGE, make_header
from mpitrain.core.layout import Array, Layout
from mpitrain.core.ranges import Range
from mpitrain.optim import Updater
from mpitrain.strategy.ps.coordinator import END, PAUSE, CoordinatorState
from mpitrain.strategy.ps.counted_steps import CountedSteps
from mpitrain.strategy.ps.messages import OPERATIONS, Kind, decode, encode
from mpitrain.strategy.ps.remote import PrefetchingShard, RemoteCoordinator, RemoteShard, ServerCalls
from mpitrain.strategy.ps.server import Server
from mpitrain.strategy.ps.shard import LocalShard, Push, Shard

from ....support.own_memory import OwnMemory

LAYOUT = Layout.pack([("weight", (10, 4), "param"), ("bias", (4,), "param")])
RANGES = [(5, 20), (32, 50)]
NAMES = ["params", "mean", "square"]
WORKERS, CLIENT, SERVER = 2, 3, 0


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("part", ["request", "reply"])
def test_every_message_has_its_fields(kind: Kind, part: str) -> None:
    record = getattr(OPERATIONS[kind], part)
    given: list[Any] = []
    for index, name in enumerate(record.names or ()):
        field = record[name]
        given.append({"i": -(2**40) - index, "f": 0.1 + index, "b": bool(index % 2)}[field.kind])
    message = encode(record, *given) if given else EMPTY
    words = make_header(7, kind, message)
    assert decode(record, words[MESSAGE]) == (tuple(given) if given else ())


class Connection:
    """Both ends of a connection between a client and a server in one process."""

    def __init__(self, ranges: list[Range], serve: Callable[[], object]) -> None:
        self.vector, self.extra = np.full(LAYOUT.size, np.nan), np.zeros(0, np.int64)
        self._ranges, self._serve = ranges, serve
        self._request: tuple[int, Array] | None = None
        self._sent: Array = np.zeros(0)
        self._reply: Array | None = None
        self.kinds: list[int] = []

    def send_request(self, server: int, kind: int, message: Array = EMPTY, vector: Array | None = None) -> None:
        assert server == SERVER and self._request is None and self._reply is None
        self.kinds.append(kind)
        self._request = kind, make_header(1, kind, message)[MESSAGE]
        if vector is not None:
            self._sent = np.concatenate([vector[lo:hi] for lo, hi in self._ranges])

    def wait_reply(self, server: int) -> Array:
        while self._reply is None:
            assert self._serve(), "the server waits, too"
        reply, self._reply = self._reply, None
        return reply

    def requests(self) -> Iterator[tuple[int, int, Array]]:
        if self._request is not None:
            (kind, message), self._request = self._request, None
            yield CLIENT, kind, message

    def request_vector(self, client: int) -> Array:
        return self._sent

    def send_reply(
        self, client: int, message: Array = EMPTY, vector: Array | None = None, extra: Array | None = None
    ) -> None:
        assert client == CLIENT and self._reply is None
        self._reply = make_header(1, 0, message)[MESSAGE]
        if vector is not None:
            for lo, hi in self._ranges:
                self.vector[lo:hi] = vector[lo:hi]
        if extra is not None:
            self.extra = extra.copy()


class Node:
    """A server's shard and step coordinator, and a client's calls of them.

    Args:
        may_change: Whether workers on the server's node change the shard, too.
    """

    def __init__(self, may_change: bool = False, prefetches: bool = False) -> None:
        rng = np.random.default_rng(0)
        self.vectors = {name: rng.random(LAYOUT.size) for name in NAMES}
        optimizer = optim.adam(0.1)
        slots = {name: self.vectors[name] for name in optimizer.slots}
        self.frozen, self.rates = np.zeros(len(LAYOUT.entries), np.uint8), np.zeros(3)
        updater = Updater(optimizer, LAYOUT, self.vectors["params"], slots, None, None, self.frozen)
        waiting = Backoff(oversubscribed=False)
        self.shard = Shard(OwnMemory(), RANGES, updater, self.vectors, self.frozen, waiting)  # type: ignore[arg-type]
        self.shard.open(0)
        self.coordinator = CountedSteps(OwnMemory(), WORKERS)  # type: ignore[arg-type]
        self.coordinator.open(0, 20, 20)
        self.wire, self.reads = (Connection(RANGES, self.serve) for _ in range(2))
        memory = SimpleNamespace(
            shards=[self.shard], coordinator=self.coordinator, frozen=self.frozen, rates=self.rates
        )
        store: Any = SimpleNamespace(
            cluster=SimpleNamespace(comm=None, task_index=0, rank=SERVER, worker_ranks=[2, CLIENT]),
            initial_vectors=self.vectors,
            shared_vectors={},
            memory=memory,
            requests=SimpleNamespace(server=self.wire),
            reads=SimpleNamespace(server=self.reads),
            plan=SimpleNamespace(vectors=NAMES, layout=LAYOUT, dtype=np.float64),
            nodes=SimpleNamespace(same=lambda server, worker: may_change and worker == 2),
            waiting=waiting,
        )
        self.server = Server(store)
        calls, self.params = ServerCalls(self.wire, SERVER), np.zeros(LAYOUT.size)  # type: ignore[arg-type]
        if prefetches:
            reads = ServerCalls(self.reads, SERVER)  # type: ignore[arg-type]
            self.remote: RemoteShard = PrefetchingShard(calls, RANGES, NAMES, self.frozen, reads, self.params)
        else:
            self.remote = RemoteShard(calls, RANGES, NAMES, self.frozen)
        self.steps = RemoteCoordinator(calls, self.remote)

    def serve(self) -> bool:
        return self.server._work()

    def state(self) -> CoordinatorState:
        """Return the state of the step coordinator itself."""
        return self.coordinator.state()

    def read(self, least: int = 0) -> tuple[int, Array]:
        """Return the version and the parameters in the shard's ranges."""
        version = self.remote.read(least)()
        source = self.params if isinstance(self.remote, PrefetchingShard) else self.wire.vector
        return version, inside(source)


def inside(vector: Array) -> Array:
    return np.concatenate([vector[lo:hi] for lo, hi in RANGES])


def gradient(step: int) -> Array:
    return np.random.default_rng(step).standard_normal(LAYOUT.size)


@pytest.mark.parametrize("may_change", [False, True])
@pytest.mark.parametrize("prefetches", [False, True])
def test_a_remote_shard_does_what_a_local_one_does(may_change: bool, prefetches: bool) -> None:
    node, other = Node(may_change, prefetches), Node()
    params = np.zeros(LAYOUT.size)
    local = LocalShard(other.shard, params, Backoff(oversubscribed=False))
    pushes = [Push(0), Push(0, scaled=True), Push(1, clip=0.5), Push(0, 0.25, True)]
    for step, push in enumerate(pushes):
        version = local.read(0)()
        assert node.read()[0] == version == step
        np.testing.assert_array_equal(node.read()[1], inside(params))
        assert node.remote.apply(gradient(step), push)() == local.apply(gradient(step), push)() == step - push.version
    for name in NAMES:
        found, expected = np.full(LAYOUT.size, 9.0), np.full(LAYOUT.size, 9.0)
        node.remote.read_vector(name, found)
        local.read_vector(name, expected)
        np.testing.assert_array_equal(found, expected)
        assert found[0] == found[-1] == 9.0  # outside of the ranges


def test_a_read_waits_for_a_version() -> None:
    node = Node()
    wait = node.remote.read(2)
    assert node.serve() and node.wire._reply is None
    node.shard.skip_step()
    node.serve()
    assert node.wire._reply is None
    node.shard.skip_step()
    node.serve()
    assert wait() == 2


def test_only_changes_of_frozen_entries_are_sent() -> None:
    node = Node()
    for flags, requests in (([0, 0], 0), ([0, 1], 1), ([1, 0], 2), ([1, 0], 0)):
        node.wire.kinds.clear()
        node.remote.freeze(np.array(flags, np.uint8))
        assert node.wire.kinds == [Kind.FREEZE] * requests and node.frozen.tolist() == flags
    node.remote.set_rate(2, 0.125)
    assert node.rates.tolist() == [0, 0, 0.125]


@pytest.mark.parametrize("prefetches", [False, True])
def test_the_reply_to_a_finished_step_brings_the_next_assignment_and_parameters(prefetches: bool) -> None:
    node = Node(prefetches=prefetches)
    assert node.steps.next(1) == (0, 0, 0)
    node.remote.apply(gradient(0), Push(0))()
    node.wire.kinds.clear()
    assert node.steps.finish(1, 0.5, 0, 3, False) == 1
    assert node.steps.next(1).item == 1
    version, params = node.read()
    assert version == 1 and node.wire.kinds == [Kind.FINISH]  # neither the assignment nor a read needs a request
    np.testing.assert_array_equal(params, inside(node.vectors["params"]))
    node.read()
    assert node.wire.kinds == [Kind.FINISH, *[Kind.READ] * (not prefetches)]
    state = node.steps.state()
    assert isinstance(state, CoordinatorState)
    assert (state.done, state.items, state.loss, state.skipped) == (1, 2, 0.5, 0)
    assert [worker.reads for worker in state.worker_stats] == [0, 3] and state == node.state()


def test_pauses_and_the_end_bring_no_parameters() -> None:
    node = Node()
    node.steps.set_pause_step(1)
    assert node.steps.next(1).item == 0
    assert node.coordinator.next(0).item != PAUSE
    node.steps.finish(1, math.nan, 0, 0, True)
    assert node.steps.next(1).item == PAUSE and node.remote.arrived is None
    assert node.coordinator.next(0).item == PAUSE
    node.steps.set_pause_step(9)
    assert node.steps.next(1).item == 1
    node.steps.request_pause()
    node.steps.stop()
    node.steps.finish(1, 0.0, 0, 0, False)
    assert node.steps.next(1).item in (PAUSE, END) and node.steps.state().skipped == 1


def test_an_assignment_is_awaited() -> None:
    node = Node()
    node.steps.set_pause_step(1)
    assert node.coordinator.next(0).item == 0  # worker 0 computes the last step before the pause
    calls = node.steps._server
    calls.post(Kind.NEXT, 1)
    assert node.serve() and node.wire._reply is None
    node.coordinator.finish(0, 0.5, 0, 0)
    node.serve()
    assert calls.wait(Kind.NEXT)[1] == PAUSE


def test_parameters_that_are_prefetched_may_be_discarded() -> None:
    node = Node(prefetches=True)
    shard = node.remote
    assert isinstance(shard, PrefetchingShard)
    shard.discard()
    shard.prefetch()
    node.serve()
    node.shard.apply(gradient(0), Push(0))
    shard.discard()
    version, params = node.read()
    assert version == 1 and node.reads.kinds == [Kind.READ] * 2
    np.testing.assert_array_equal(params, inside(node.vectors["params"]))
    shard.prefetch()
    node.serve()
    node.shard.skip_step()
    assert node.read()[0] == 1  # the version at the time of the request
