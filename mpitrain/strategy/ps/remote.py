"""A worker's proxies for a shard or the step coordinator on another node; that node's server makes the calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...comm.rpc import RpcTransport, unpack
from ...core.layout import Array
from .coordinator import END, PAUSE, STATE, Assignment, CoordinatorState, unpack_state
from .messages import REPLY, Kind, request
from .shard import Push, Ranges


class RemoteShard:
    """A shard on another node; see ``shard.ShardClient``. The parameters arrive in the transport's ``vector``.

    Args:
        server: The rank of its server.
        ranges: Its ranges of the vector.
        names: The names of the vectors, in the plan's order.
        frozen: The entries that the server does not change at first.
    """

    def __init__(self, rpc: RpcTransport, server: int, ranges: Ranges, names: list[str], frozen: Array) -> None:
        self._rpc, self._server, self.ranges, self._names = rpc, server, ranges, names
        self._frozen = frozen.copy()  # as the server has it
        self.arrived: int | None = None  # the version of parameters that have arrived without a request to read

    def post_read(self, least: int) -> None:
        if self.arrived is None:
            self._rpc.request(self._server, Kind.READ, request(Kind.READ, least))

    def wait_read(self) -> int:
        version, self.arrived = self.arrived, None
        if version is None:
            version = int(unpack(self._rpc.reply(self._server), REPLY[Kind.READ])["version"])
        return version

    def read_vector(self, name: str, out: Array) -> None:
        self._rpc.request(self._server, Kind.VECTOR, request(Kind.VECTOR, self._names.index(name)))
        self._rpc.reply(self._server)
        for lo, hi in self.ranges:
            out[lo:hi] = self._rpc.vector[lo:hi]

    def freeze(self, frozen: Array) -> None:
        for entry in np.flatnonzero(frozen != self._frozen).tolist():
            self._rpc.request(self._server, Kind.FREEZE, request(Kind.FREEZE, entry, frozen[entry]))
            self._rpc.reply(self._server)
        self._frozen[:] = frozen

    def set_rate(self, index: int, rate: float) -> None:
        """Set one of the optimizer's ``live_rates`` on the server's node."""
        self._rpc.request(self._server, Kind.RATE, request(Kind.RATE, index, rate))
        self._rpc.reply(self._server)

    def post_apply(self, grads: Array, push: Push) -> None:
        self._rpc.request(self._server, Kind.APPLY, request(Kind.APPLY, *push), grads)

    def wait_apply(self) -> int:
        return int(unpack(self._rpc.reply(self._server), REPLY[Kind.APPLY])["staleness"])

    def post_collect(self, grads: Array, item: int, step: int, loss: float) -> None:
        self._rpc.request(self._server, Kind.COLLECT, request(Kind.COLLECT, item, step, loss), grads)

    def wait_collected(self, step: int) -> None:
        self._rpc.reply(self._server)


class PrefetchingShard(RemoteShard):
    """A shard whose parameters can be read during a step, while its gradient is computed and sent.

    Args:
        reads: The transport of these requests; the others are those of ``RemoteShard``.
        params: Shape (layout.size,): where the parameters are copied to.
    """

    def __init__(
        self,
        rpc: RpcTransport,
        server: int,
        ranges: Ranges,
        names: list[str],
        frozen: Array,
        reads: RpcTransport,
        params: Array,
    ) -> None:
        super().__init__(rpc, server, ranges, names, frozen)
        self._reads, self._params = reads, params
        self._is_pending = False

    def prefetch(self) -> None:
        """Request the newest parameters for the next ``wait_read``."""
        self._reads.request(self._server, Kind.READ, request(Kind.READ, 0))
        self._is_pending = True

    def discard(self) -> None:
        """Wait for parameters that have been requested, and ignore them: the next ``wait_read`` gets newer ones."""
        if self._is_pending:
            self._wait()

    def post_read(self, least: int) -> None:
        if not self._is_pending:
            self.prefetch()

    def wait_read(self) -> int:
        version = self._wait()
        for lo, hi in self.ranges:
            self._params[lo:hi] = self._reads.vector[lo:hi]
        return version

    def _wait(self) -> int:
        self._is_pending = False
        return int(unpack(self._reads.reply(self._server), REPLY[Kind.READ])["version"])


class RemoteCoordinator:
    """The step coordinator on another node; see ``coordinator.StepCoordinator``.

    The reply to ``finish`` brings the next assignment and parameters, unless these are prefetched, so that a step takes
    two round trips: this one, and the one of the gradient.

    Args:
        server: The rank of the first server.
        shard: Its shard.
    """

    def __init__(self, rpc: RpcTransport, server: int, shard: RemoteShard) -> None:
        self._rpc, self._server, self._shard = rpc, server, shard
        self._assigned: Assignment | None = None
        self._brings_params = not isinstance(shard, PrefetchingShard)

    def next(self) -> Assignment:
        assignment, self._assigned = self._assigned, None
        return Assignment(*self._query(Kind.NEXT)) if assignment is None else assignment

    def finish(self, loss: float, staleness: int, reads: int, skipped: bool) -> int:
        brings_params = self._brings_params
        done, item, step, lead, version = self._query(Kind.TURN, loss, staleness, reads, skipped, brings_params)
        self._assigned = Assignment(item, step, lead)
        self._shard.arrived = version if brings_params and item not in (PAUSE, END) else None
        return int(done)

    def admit(self, item: int, step: int, loss: float, reads: int) -> int:
        return int(self._query(Kind.ADMIT, item, step, loss, reads)[0])

    def set_pause_step(self, step: int) -> None:
        self._query(Kind.PAUSE_STEP, step)

    def request_pause(self) -> None:
        self._query(Kind.REQUEST_PAUSE)

    def stop(self) -> None:
        self._query(Kind.STOP)

    def state(self) -> CoordinatorState:
        return unpack_state(np.array(self._query(Kind.STATE), STATE), self._rpc.rows)

    def _query(self, kind: Kind, *values: float) -> tuple[Any, ...]:
        """Send a request, and return the fields of its reply."""
        self._rpc.request(self._server, kind, request(kind, *values))
        message = self._rpc.reply(self._server)
        return unpack(message, REPLY[kind]).item() if kind in REPLY else ()
