"""The store of a program's ranks without MASTER_ADDR: MPI tells them where it is."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..comm.mpi import MPI, start

_LOCAL = "127.0.0.1"


def rendezvous(url: str, timeout: timedelta = timedelta(minutes=5), **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the store, this rank and the number of ranks: the handler of ``mpitrain://``.

    Collective over MPI's world. Rank 0 opens the store on a free port.
    """
    comm = start()
    node = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
    one_node = comm.allreduce(node.size == comm.size, op=MPI.LAND)
    node.Free()
    host = _LOCAL if one_node else socket.gethostname()
    store = None
    open_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    if comm.rank == 0:
        store = open_store(host, 0, comm.size, is_master=True, timeout=timeout, wait_for_workers=False)
    host, port = comm.bcast((host, store.port if store else 0), root=0)
    if store is None:
        store = open_store(host, port, comm.size, is_master=False, timeout=timeout, wait_for_workers=False)
    yield store, comm.rank, comm.size
