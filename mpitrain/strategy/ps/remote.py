"""A worker's proxies for a shard or the step coordinator on another node, whose server executes the calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ...comm.rpc import RpcClient
from ...core.layout import Array
from ...core.ranges import Range
from .coordinator import END, PAUSE, STATE, Assignment, CoordinatorState, unpack_state
from .messages import OPERATIONS, Kind, decode, encode
from .shard import LocalShard, Push


class ServerCalls:
    """Calls of operations on one server.

    Args:
        server: The rank of the server.

    Attributes:
        rpc: The client that sends the requests.
    """

    def __init__(self, rpc: RpcClient, server: int) -> None:
        self.rpc, self._server = rpc, server

    def post(self, kind: Kind, *values: Any, vector: Array | None = None) -> None:
        """Send a request with these fields; ``wait`` must follow."""
        self.rpc.send_request(self._server, kind, encode(OPERATIONS[kind].request, *values), vector)

    def wait(self, kind: Kind) -> tuple[Any, ...]:
        """Wait for the reply, and return its fields."""
        return decode(OPERATIONS[kind].reply, self.rpc.wait_reply(self._server))

    def call(self, kind: Kind, *values: Any) -> tuple[Any, ...]:
        """Send a request, and return the fields of its reply."""
        self.post(kind, *values)
        return self.wait(kind)


class RemoteShard:
    """A shard on another node; see ``shard.LocalShard``. The parameters arrive in ``RpcClient.vector``.

    Args:
        server: The calls to the shard's server.
        ranges: The shard's ranges of the vector.
        names: The names of the vectors, in the plan's order.
        frozen: The entries that the server does not change at first.

    Attributes:
        server: As given.
        arrived: The version of parameters that have arrived without a request to read; None if there are none.
    """

    def __init__(self, server: ServerCalls, ranges: Sequence[Range], names: list[str], frozen: Array) -> None:
        self.server, self.ranges, self._names = server, ranges, names
        self._frozen = frozen.copy()  # the value that the server has
        self.arrived: int | None = None

    def read(self, least: int) -> Callable[[], int]:
        arrived, self.arrived = self.arrived, None
        if arrived is not None:
            version = arrived
            return lambda: version
        self.server.post(Kind.READ, least)
        return lambda: int(self.server.wait(Kind.READ)[0])

    def read_vector(self, name: str, out: Array) -> None:
        self.server.call(Kind.VECTOR, self._names.index(name))
        for lo, hi in self.ranges:
            out[lo:hi] = self.server.rpc.vector[lo:hi]

    def freeze(self, frozen: Array) -> None:
        for entry in np.flatnonzero(frozen != self._frozen).tolist():
            self.server.call(Kind.FREEZE, entry, frozen[entry])
        self._frozen[:] = frozen

    def set_rate(self, index: int, rate: float) -> None:
        """Set one of the optimizer's ``live_rates`` on the server's node."""
        self.server.call(Kind.RATE, index, rate)

    def apply(self, grads: Array, push: Push) -> Callable[[], int]:
        self.server.post(Kind.APPLY, *push, vector=grads)
        return lambda: int(self.server.wait(Kind.APPLY)[0])


class PrefetchingShard(RemoteShard):
    """A shard whose parameters can be read during a step, while its gradient is computed and sent.

    Args:
        reads: Calls over a second transport, which only read parameters.
        params: Shape (layout.size,): where the parameters are copied to.
    """

    def __init__(
        self,
        server: ServerCalls,
        ranges: Sequence[Range],
        names: list[str],
        frozen: Array,
        reads: ServerCalls,
        params: Array,
    ) -> None:
        super().__init__(server, ranges, names, frozen)
        self._reads, self._params = reads, params
        self._is_pending = False

    def prefetch(self) -> None:
        """Request the newest parameters for the next ``read``."""
        self._reads.post(Kind.READ, 0)
        self._is_pending = True

    def discard(self) -> None:
        """Wait for parameters that have been requested, and ignore them: the next ``read`` gets newer ones."""
        if self._is_pending:
            self._wait()

    def read(self, least: int) -> Callable[[], int]:
        if not self._is_pending:
            self.prefetch()
        return self._receive

    def _receive(self) -> int:
        version = self._wait()
        for lo, hi in self.ranges:
            self._params[lo:hi] = self._reads.rpc.vector[lo:hi]
        return version

    def _wait(self) -> int:
        self._is_pending = False
        return int(self._reads.wait(Kind.READ)[0])


ShardClient: TypeAlias = "LocalShard | RemoteShard"  # a shard as a worker uses it


class RemoteCoordinator:
    """The step coordinator on another node; has the methods of ``CoordinatorMemory`` and its subclasses.

    The reply to ``finish`` brings the next assignment and, unless they are prefetched, the parameters of the first
    server. A step of ``async`` and ``ssp`` therefore takes two round trips to this server: the gradient and ``finish``.

    Args:
        server: The first server.
        shard: The first server's shard.
    """

    def __init__(self, server: ServerCalls, shard: RemoteShard) -> None:
        self._server, self._shard = server, shard
        self._assigned: Assignment | None = None
        self._brings_params = not isinstance(shard, PrefetchingShard)

    def next(self, worker: int) -> Assignment:
        """Return a work item, a pause, or the end, when the server assigns one of them."""
        assignment, self._assigned = self._assigned, None
        if assignment is None:
            _, *fields, _ = self._server.call(Kind.NEXT, worker)
            assignment = Assignment(*fields)
        return assignment

    def finish(self, worker: int, loss: float, staleness: int, reads: int, skipped: bool) -> int:
        words = (worker, loss, staleness, reads, skipped, self._brings_params)
        done, item, step, lead, version = self._server.call(Kind.FINISH, *words)
        self._assigned = Assignment(item, step, lead)
        self._shard.arrived = version if self._brings_params and item not in (PAUSE, END) else None
        return int(done)

    def admit(self, worker: int, item: int, step: int, loss: float, reads: int) -> int:
        return int(self._server.call(Kind.ADMIT, worker, item, step, loss, reads)[0])

    def set_pause_step(self, step: int) -> None:
        self._server.call(Kind.PAUSE_STEP, step)

    def request_pause(self) -> None:
        self._server.call(Kind.REQUEST_PAUSE)

    def stop(self) -> None:
        self._server.call(Kind.STOP)

    def state(self) -> CoordinatorState:
        return unpack_state(np.array(self._server.call(Kind.STATE), STATE), self._server.rpc.extra)
