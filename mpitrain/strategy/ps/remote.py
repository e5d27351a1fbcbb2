"""A worker's view of a shard or a ledger on another node: the same calls, made by that node's server."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from ...comm.rpc import RpcTransport
from ...core.layout import Array
from .coordinator import CoordinatorState, unpack_state
from .shard import Push


class Kind(IntEnum):
    """What a worker asks of a server; in brackets what it tells, and what the reply brings."""

    APPLY = 1  # (version, clip, scaled; the gradient) -> staleness
    READ = 2  # (least version) -> version; parameters
    VECTOR = 3  # (number of the vector) -> ; the vector
    NEXT = 4  # () -> ticket, step, steps ahead
    FINISH = 5  # (loss, staleness, reads, skipped) -> steps done
    ADMIT = 6  # (ticket, step, loss, reads) -> place
    COLLECT = 7  # (ticket, step, loss; the gradient) -> once the step is applied
    STATE = 8  # () -> the state's numbers; accounts
    PAUSE_STEP = 9  # (step) ->
    STOP = 10  # () ->


class RemoteShard:
    """A shard on another node. Requests are posted first and waited for later, so that several servers work at once.

    Args:
        server: Its server's rank.
        names: Of the vectors, in the order of the plan.
    """

    def __init__(self, rpc: RpcTransport, server: int, names: list[str]) -> None:
        self._rpc, self._server, self._names = rpc, server, names

    def post_apply(self, grads: Array, push: Push) -> None:
        """Send a gradient to be applied; ``wait_apply`` follows."""
        self._rpc.request(self._server, Kind.APPLY, [push.version, push.clip, int(push.scaled)], grads)

    def wait_apply(self) -> int:
        """Wait until it is applied; return its staleness."""
        return self._rpc.reply(self._server)[0]

    def post_collect(self, grads: Array, item: int, step: int, loss: float) -> None:
        """backup: send a gradient that has a place in its step; ``wait``, until the step is applied, follows."""
        self._rpc.request(self._server, Kind.COLLECT, [item, step, float(loss)], grads)

    def post_read(self, version: int) -> None:
        """Ask for parameters of at least this version; ``wait_read`` follows."""
        self._rpc.request(self._server, Kind.READ, [version])

    def wait_read(self) -> int:
        """Wait until they are in the mail's ``vector``; return their version."""
        return self._rpc.reply(self._server)[0]

    def read_vector(self, name: str) -> None:
        """Bring one of the vectors to the mail's ``vector``."""
        self._rpc.request(self._server, Kind.VECTOR, [self._names.index(name)])
        self.wait()

    def wait(self) -> None:
        """Wait for a reply that says nothing."""
        self._rpc.reply(self._server)


class RemoteCoordinator:
    """The ledger on another node; methods as those of ``StepCoordinator``.

    Args:
        server: The first server's rank.
    """

    def __init__(self, rpc: RpcTransport, server: int) -> None:
        self._rpc, self._server = rpc, server

    def _ask(self, kind: Kind, *arguments: float) -> list[int]:
        self._rpc.request(self._server, kind, arguments)
        return self._rpc.reply(self._server)

    def next(self) -> tuple[int, int, int]:
        """A ticket, its step, and how many steps this worker is ahead; waits."""
        item, step, ahead = self._ask(Kind.NEXT)[:3]
        return item, step, ahead

    def finish(self, loss: float, staleness: int, reads: int, skipped: bool) -> int:
        return self._ask(Kind.FINISH, float(loss), staleness, reads, int(skipped))[0]

    def admit(self, item: int, step: int, loss: float, reads: int) -> int:
        return self._ask(Kind.ADMIT, item, step, float(loss), reads)[0]

    def set_pause_step(self, step: int) -> None:
        self._ask(Kind.PAUSE_STEP, step)

    def stop(self) -> None:
        self._ask(Kind.STOP)

    def state(self) -> CoordinatorState:
        numbers = self._ask(Kind.STATE)[:5]
        return unpack_state(np.array(numbers, np.int64), self._rpc.rows)
