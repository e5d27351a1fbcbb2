"""The choice of a transport."""

from __future__ import annotations

import logging

from ..mpi import MPI
from .interface import Routes, RpcClient, RpcServer
from .messages import MessageClient, MessageServer
from .windows import WindowClient, WindowServer

_log = logging.getLogger(__name__)
_abandoned: list[WindowClient | WindowServer] = []


def open_rpc(routes: Routes, one_sided: bool) -> tuple[RpcClient, None] | tuple[None, RpcServer]:
    """Return this rank's end, as a worker or as a server. Collective over the ranks.

    Args:
        one_sided: Whether to use windows, if they work; otherwise, and if they do not work, messages are used.
    """
    windows = _open_windows(routes) if one_sided else None
    if routes.is_server:
        assert not isinstance(windows, WindowClient)
        return None, windows or MessageServer(routes)
    assert not isinstance(windows, WindowServer)
    return windows or MessageClient(routes), None


def _open_windows(routes: Routes) -> WindowClient | WindowServer | None:
    """Return this rank's end with windows; None on all ranks if windows do not work."""
    end: WindowClient | WindowServer | None = None
    problem = ""
    try:
        end = WindowServer(routes) if routes.is_server else WindowClient(routes)
        if not end.window.is_unified:
            problem = "RMA windows have a separate memory model (MPI_WIN_SEPARATE)"
    except MPI.Exception as error:
        problem = f"MPI cannot create RMA windows: {error}"
    problems = [text for text in routes.comm.allgather(problem) if text]
    if not problems and end is not None:
        if end.window.progresses():
            return end
        problems = ["RMA windows make no progress"]
    if end is not None:
        _abandoned.append(end)  # freeing the window would wait forever for pending operations: keep it and its memory
    _log.info("servers on other nodes are reached by messages: %s", problems[0])
    return None
