"""A worker's proxies for a shard or the step coordinator on another node; that node's server makes the calls."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from ...comm.rpc import RpcTransport
from ...core.layout import Array
from .coordinator import CoordinatorState, unpack_state
from .shard import Push


class Kind(IntEnum):
    """Requests from a worker to a server, as (arguments; vector) -> reply; vector."""

    APPLY = 1  # (version, clip, scaled; the gradient) -> staleness
    READ = 2  # (least version) -> version; parameters
    VECTOR = 3  # (index of the vector) -> ; the vector
    NEXT = 4  # () -> work item, step, steps ahead
    FINISH = 5  # (loss, staleness, reads, skipped) -> steps done
    ADMIT = 6  # (work item, step, loss, reads) -> place
    COLLECT = 7  # (work item, step, loss; the gradient) -> (after the step is applied)
    STATE = 8  # () -> the state's numbers; worker statistics
    PAUSE_STEP = 9  # (step) ->
    STOP = 10  # () ->


class RemoteShard:
    """A shard on another node. Requests are posted first and waited for later, so that several servers work at once.

    Args:
        server: The rank of its server.
        names: The names of the vectors, in the plan's order.
    """

    def __init__(self, rpc: RpcTransport, server: int, names: list[str]) -> None:
        self._rpc, self._server, self._names = rpc, server, names

    def post_apply(self, grads: Array, push: Push) -> None:
        """Send a gradient to apply; ``wait_apply`` must follow."""
        self._rpc.request(self._server, Kind.APPLY, [push.version, push.clip, int(push.scaled)], grads)

    def wait_apply(self) -> int:
        """Wait until it is applied; return its staleness."""
        return self._rpc.reply(self._server)[0]

    def post_collect(self, grads: Array, item: int, step: int, loss: float) -> None:
        """backup: send a gradient that has a place in its step; ``wait`` must follow, and returns after the step."""
        self._rpc.request(self._server, Kind.COLLECT, [item, step, float(loss)], grads)

    def post_read(self, version: int) -> None:
        """Request parameters of at least this version; ``wait_read`` must follow."""
        self._rpc.request(self._server, Kind.READ, [version])

    def wait_read(self) -> int:
        """Wait until they are in the transport's ``vector``; return their version."""
        return self._rpc.reply(self._server)[0]

    def read_vector(self, name: str) -> None:
        """Read one of the vectors into the transport's ``vector``."""
        self._rpc.request(self._server, Kind.VECTOR, [self._names.index(name)])
        self.wait()

    def wait(self) -> None:
        """Wait for a reply without arguments."""
        self._rpc.reply(self._server)


class RemoteCoordinator:
    """The step coordinator on another node; see ``StepCoordinator`` for the methods.

    Args:
        server: The rank of the first server.
    """

    def __init__(self, rpc: RpcTransport, server: int) -> None:
        self._rpc, self._server = rpc, server

    def _query(self, kind: Kind, *arguments: float) -> list[int]:
        self._rpc.request(self._server, kind, arguments)
        return self._rpc.reply(self._server)

    def next(self) -> tuple[int, int, int]:
        """Return a work item, its step, and how many steps this worker is ahead; blocks until there is one."""
        item, step, ahead = self._query(Kind.NEXT)[:3]
        return item, step, ahead

    def finish(self, loss: float, staleness: int, reads: int, skipped: bool) -> int:
        return self._query(Kind.FINISH, float(loss), staleness, reads, int(skipped))[0]

    def admit(self, item: int, step: int, loss: float, reads: int) -> int:
        return self._query(Kind.ADMIT, item, step, float(loss), reads)[0]

    def set_pause_step(self, step: int) -> None:
        self._query(Kind.PAUSE_STEP, step)

    def stop(self) -> None:
        self._query(Kind.STOP)

    def state(self) -> CoordinatorState:
        numbers = self._query(Kind.STATE)[:5]
        return unpack_state(np.array(numbers, np.int64), self._rpc.rows)
