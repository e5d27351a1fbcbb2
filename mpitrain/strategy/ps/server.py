"""A parameter server: answers requests from workers on other nodes.

Workers on the server's node send no requests: they read and update its shard in shared memory. A server polls for
requests, which also lets MPI progress, and sleeps while idle. It also polls a nonblocking barrier that each worker
enters at its end. The server ends when every worker has entered the barrier.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ...comm.backoff import LONG
from ...comm.mpi import MPI
from ...comm.rpc import EMPTY, RpcServer
from ...core import activity
from ...core.layout import Array
from ...monitor.trace import span
from ...plan.progress import Progress
from .coordinator import END, PAUSE, WAIT, CoordinatorMemory
from .counted_steps import CountedSteps
from .messages import OPERATIONS, Kind, decode, encode
from .shard import Push
from .store import ParameterStore

_LONGEST_WAIT_S = 60.0  # interval at which an idle server marks progress, so that it does not count as hanging


class Server:
    """Serves one shard; the first server also serves the step coordinator. Constructed and started like a ``Strategy``.

    Args:
        store: The store of this rank.

    Attributes:
        initial_vectors, shared_vectors: See ``Strategy``.
    """

    polls = False  # whether there is work that does not arrive as requests

    def __init__(self, store: ParameterStore) -> None:
        cluster = store.cluster
        self._store, self._comm = store, cluster.comm
        self.initial_vectors, self.shared_vectors = store.initial_vectors, store.shared_vectors
        self._number = cluster.task_index
        self._shard = store.memory.shards[self._number]
        self._rpc, self._reads = store.requests.server, store.reads.server
        self._names = store.plan.vectors
        self._coordinator = store.memory.coordinator if self._number == 0 else None
        self._may_change = self._is_changed_by_workers()
        self._staging = np.zeros(store.plan.layout.size if self._may_change else 0, store.plan.dtype)
        self._deferred: list[Callable[[], bool]] = []  # replies that are sent when they are ready

    def start(self, progress: Progress) -> None:
        """Begin to serve ``initial_vectors``, which have been filled. Collective over all ranks."""
        self._store.start(progress)

    def close(self) -> None:
        """Free memory. Collective over all ranks."""
        self._store.free()

    def serve(self) -> None:
        """Answer requests until all ranks have entered the barrier ``Comm.Ibarrier``. Collective over all ranks."""
        barrier = self._comm.Ibarrier()
        while not barrier.Test():
            # One span for many polls: each span counts as progress, and Ctrl-C must not wait for an idle server.
            with span("wait"):
                self._await_work(barrier)

    def _await_work(self, barrier: MPI.Request) -> None:
        """Return after some work, when all ranks have entered the barrier, or when idle for ``_LONGEST_WAIT_S``."""
        rpc = self._rpc
        idle = 1 if rpc is not None or self.polls else LONG
        until = time.monotonic() + _LONGEST_WAIT_S
        while not self._work() and not barrier.Test() and time.monotonic() < until:
            if rpc is None or not rpc.is_receiving():
                self._store.waiting.pause(idle)
            idle += 1

    def _work(self) -> bool:
        """Answer the requests that have arrived; return whether there was any, or a step was completed."""
        worked = False
        if self._reads is not None:
            for client, *_ in self._reads.requests():
                worked = True
                self._send_params(self._reads, client)
        if self._rpc is not None:
            for client, number, message in self._rpc.requests():
                worked = True
                kind = Kind(number)
                self._answer(client, kind, decode(OPERATIONS[kind].request, message))
        if self._apply_steps():
            worked = True
        if self._deferred:
            self._deferred = [respond for respond in self._deferred if not respond()]
        return worked

    def _apply_steps(self) -> bool:
        """Apply steps in modes in which servers do that; return whether a step was applied."""
        return False

    def _is_changed_by_workers(self) -> bool:
        """Return whether workers on this node change the shard themselves."""
        store = self._store
        return any(store.nodes.same(store.cluster.rank, worker) for worker in store.cluster.worker_ranks)

    @span("serve")
    def _answer(self, client: int, kind: Kind, fields: tuple[Any, ...]) -> None:
        """Reply to a request with these fields, or defer the reply in ``_deferred``."""
        if method := OPERATIONS[kind].method:
            result = getattr(self._require_coordinator(), method)(*fields)
            self._reply(client, EMPTY if result is None else encode(OPERATIONS[kind].reply, result))
        else:
            getattr(self, f"_{kind.name.lower()}")(client, *fields)
        activity.set_step(self._shard.version)

    def _reply(
        self, client: int, message: Array = EMPTY, vector: Array | None = None, extra: Array | None = None
    ) -> None:
        assert self._rpc is not None
        with activity.waiting():  # a stopped client can block the reply
            self._rpc.send_reply(client, message, vector, extra)

    def _apply(self, client: int, version: int, clip: float, scaled: bool) -> None:
        assert self._rpc is not None
        grads = self._rpc.request_vector(client)
        with span("update"):
            staleness = self._shard.apply(grads, Push(version, clip, scaled))
        self._reply(client, encode(OPERATIONS[Kind.APPLY].reply, staleness))

    def _read(self, client: int, version: int) -> None:
        def respond() -> bool:
            if self._shard.version < version:
                return False
            self._send_params(self._rpc, client)
            return True

        self._when_ready(respond)

    def _send_params(self, rpc: RpcServer | None, client: int) -> None:
        assert rpc is not None
        version, params = self._snapshot("params")
        with activity.waiting():  # a stopped client can block the reply
            rpc.send_reply(client, encode(OPERATIONS[Kind.READ].reply, version), params)

    def _vector(self, client: int, index: int) -> None:
        self._reply(client, vector=self._snapshot(self._names[index])[1])

    def _snapshot(self, name: str) -> tuple[int, Array]:
        """Return the version and one of the vectors, which does not change until it is sent."""
        if not self._may_change:
            return self._shard.version, self._shard.vectors[name]
        # A copy, so that workers on this node wait only for the copy, not for the network.
        return self._shard.read(self._staging, name), self._staging

    def _next(self, client: int, worker: int) -> None:
        self._assign(client, worker)

    def _finish(
        self, client: int, worker: int, loss: float, staleness: int, reads: int, skipped: bool, brings_params: bool
    ) -> None:
        coordinator = self._require_coordinator()
        assert isinstance(coordinator, CountedSteps)
        self._assign(client, worker, coordinator.finish(worker, loss, staleness, reads, skipped), brings_params)

    def _assign(self, client: int, worker: int, done: int = 0, brings_params: bool = False) -> None:
        """Reply with the number of steps done and the worker's next assignment, when there is one."""
        coordinator = self._require_coordinator()

        def respond() -> bool:
            assignment = coordinator.next(worker)
            if assignment.item == WAIT:
                return False
            sends_params = brings_params and assignment.item not in (PAUSE, END)
            version, params = self._snapshot("params") if sends_params else (0, None)
            self._reply(client, encode(OPERATIONS[Kind.FINISH].reply, done, *assignment, version), vector=params)
            return True

        self._when_ready(respond)

    def _freeze(self, client: int, entry: int, frozen: bool) -> None:
        self._store.memory.frozen[entry] = frozen
        self._reply(client)

    def _rate(self, client: int, index: int, rate: float) -> None:
        self._store.memory.rates[index] = rate
        self._reply(client)

    def _state(self, client: int) -> None:
        state, statistics = self._require_coordinator().raw_state()
        self._reply(client, state, extra=statistics)

    def _when_ready(self, respond: Callable[[], bool]) -> None:
        if not respond():
            self._deferred.append(respond)

    def _require_coordinator(self) -> CoordinatorMemory:
        assert self._coordinator is not None, "only the first server has the step coordinator"
        return self._coordinator
