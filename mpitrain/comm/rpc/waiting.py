"""How a worker waits for a reply."""

from __future__ import annotations

from collections.abc import Callable

from ..backoff import Backoff
from .interface import Routes

_YIELD_S = 2e-3  # time that a worker polls for a reply before it sleeps, in addition to the vector's transfer time
_SLOW_BYTES_PER_S = 0.5e9


class ReplyWaiting:
    """Waits for replies. Local."""

    def __init__(self, routes: Routes) -> None:
        # Do not spin, and sleep late: MPI makes no progress while this rank spins or sleeps, which delays data.
        capacity = max((routes.capacity(server) for server in routes.servers(routes.comm.rank)), default=0)
        yield_s = _YIELD_S + capacity * routes.dtype.itemsize / _SLOW_BYTES_PER_S
        self._backoff, self._comm = Backoff(oversubscribed=True, yield_s=yield_s), routes.comm

    def until(self, server: int, has_arrived: Callable[[], bool]) -> None:
        """Return when a reply of a server has arrived; let MPI progress meanwhile."""
        self._backoff.until(lambda spins: has_arrived(), self._comm.Iprobe, lambda: server)
