"""RPC by point-to-point messages, for MPI libraries on which windows do not work.

A header is a message; its first word says which further messages follow: a vector, extra words. Messages between two
ranks with the same tag arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...core.layout import Array
from ..mpi import MPI
from .coding import Decoder, Encoder
from .interface import EMPTY, HEADER, MESSAGE, Routes, make_header, reply_backoff

_REQUEST, _REPLY, _VECTOR, _EXTRA = 101, 102, 103, 104  # tags
_HAS_VECTOR, _HAS_EXTRA = 1, 2  # flags in the first word of a header


class _Outbox:
    """Sends messages without waiting: a server that waits for one client would block the others."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._sending: list[tuple[MPI.Request, Array]] = []  # buffers must exist until they are sent

    def send(self, array: Array, rank: int, tag: int) -> None:
        self._sending = [(request, buffer) for request, buffer in self._sending if not request.Test()]
        self._sending.append((self._comm.Isend(array, rank, tag), array))

    def free(self) -> None:
        MPI.Request.Waitall([request for request, _ in self._sending])


class MessageClient:
    """``RpcClient`` by messages."""

    def __init__(self, routes: Routes) -> None:
        self._routes, self._comm, self._outbox = routes, routes.comm, _Outbox(routes.comm)
        self._encoder, self._waiting = Encoder(routes), reply_backoff(routes)
        self.residual = self._encoder.residual
        self.vector = np.zeros(routes.size if routes.servers(routes.comm.rank) else 0, routes.dtype)
        self.extra = np.zeros(routes.n_extra, np.int64)

    def send_request(self, server: int, kind: int, message: Array = EMPTY, vector: Array | None = None) -> None:
        self._outbox.send(make_header(_HAS_VECTOR * (vector is not None), kind, message), server, _REQUEST)
        if vector is not None:
            pieces = [piece.view(np.uint8) for piece in self._encoder.encode(vector, server)]
            self._outbox.send(np.concatenate([np.zeros(0, np.uint8), *pieces]), server, _VECTOR)

    def wait_reply(self, server: int) -> Array:
        self._waiting.until(lambda spins: self._comm.Iprobe(server, _REPLY), blocking_rank=lambda: server)
        header = np.empty(HEADER, np.int64)
        self._comm.Recv(header, server, _REPLY)
        if header[0] & _HAS_VECTOR:
            compact = np.empty(self._routes.capacity(server), self._routes.dtype)
            self._comm.Recv(compact, server, _VECTOR)
            before = 0
            for lo, hi in self._routes.ranges[server]:
                self.vector[lo:hi] = compact[before : before + hi - lo]
                before += hi - lo
        if header[0] & _HAS_EXTRA:
            self._comm.Recv(self.extra, server, _EXTRA)
        return header[MESSAGE]

    def free(self) -> None:
        self._outbox.free()


class MessageServer:
    """``RpcServer`` by messages."""

    def __init__(self, routes: Routes) -> None:
        rank = routes.comm.rank
        self._comm, self._outbox, self._decoder = routes.comm, _Outbox(routes.comm), Decoder(routes)
        self._ranges = routes.ranges[rank]
        nbytes = routes.request_nbytes(rank)
        self._buffers = {client: np.zeros(nbytes, np.uint8) for client in routes.clients[rank]}

    def requests(self) -> Iterator[tuple[int, int, Array]]:
        status = MPI.Status()
        while self._buffers and self._comm.Iprobe(MPI.ANY_SOURCE, _REQUEST, status):
            client = status.Get_source()
            header = np.empty(HEADER, np.int64)
            self._comm.Recv(header, client, _REQUEST)
            if header[0] & _HAS_VECTOR:
                self._comm.Recv(self._buffers[client], client, _VECTOR)
            yield client, int(header[1]), header[MESSAGE]

    def is_receiving(self) -> bool:
        return False

    def request_vector(self, client: int) -> Array:
        return self._decoder.decode(self._buffers[client], client)

    def send_reply(
        self, client: int, message: Array = EMPTY, vector: Array | None = None, extra: Array | None = None
    ) -> None:
        contents = _HAS_VECTOR * (vector is not None) + _HAS_EXTRA * (extra is not None)
        self._outbox.send(make_header(contents, 0, message), client, _REPLY)
        if vector is not None:
            compact = np.concatenate([vector[:0], *(vector[lo:hi] for lo, hi in self._ranges)])
            self._outbox.send(compact, client, _VECTOR)
        if extra is not None:
            self._outbox.send(extra, client, _EXTRA)

    def free(self) -> None:
        self._outbox.free()
