"""RPC between workers and parameter servers on other nodes: requests and replies with vectors attached.

A worker is a client of the servers on other nodes, and has at most one outstanding request per server. ``interface``
defines the two roles; ``windows`` implements them by RMA windows, ``messages`` by point-to-point messages.
"""

from __future__ import annotations

from .interface import EMPTY, Routes, RpcClient, RpcServer, unpack
from .opening import open_rpc

__all__ = ["EMPTY", "Routes", "RpcClient", "RpcServer", "open_rpc", "unpack"]
