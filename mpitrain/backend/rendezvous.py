"""Rendezvous without MASTER_ADDR: rank 0 starts a store and broadcasts its address over MPI."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..comm.mpi import MPI, start
from ..errors import LaunchError
from ..process.network import own_addresses

_LOCAL = "127.0.0.1"
_CONNECT_S = 3.0  # maximum time to try one of rank 0's addresses


def rendezvous(url: str, timeout: timedelta = timedelta(minutes=5), **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the store, this rank and the number of ranks: the handler of ``mpitrain://``.

    Collective over MPI's world. Rank 0 opens the store on a free port.

    Raises:
        LaunchError: This rank cannot connect to rank 0.
    """
    comm = start()
    node = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
    one_node = comm.allreduce(node.size == comm.size, op=MPI.LAND)
    node.Free()
    store = None
    open_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    if comm.rank == 0:
        store = open_store(_LOCAL, 0, comm.size, is_master=True, timeout=timeout, wait_for_workers=False)
    addresses = [_LOCAL] if one_node else [socket.gethostname(), *own_addresses()]
    addresses, port = comm.bcast((addresses, store.port if store else 0), root=0)
    if store is None:
        host = _reachable(addresses, port)
        store = open_store(host, port, comm.size, is_master=False, timeout=timeout, wait_for_workers=False)
    yield store, comm.rank, comm.size


def _reachable(addresses: list[str], port: int) -> str:
    """Return the first of rank 0's addresses that this host can connect to."""
    for address in addresses:
        with suppress(OSError), socket.create_connection((address, port), timeout=_CONNECT_S):
            return address
    raise LaunchError(
        f"{socket.gethostname()} cannot connect to rank 0 at any of {', '.join(addresses)}, port {port}; "
        "allow connections between the hosts, or set MASTER_ADDR and MASTER_PORT and use init_method='env://'"
    )
