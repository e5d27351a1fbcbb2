"""RPC by RMA windows, with Put only.

Between nodes, Put runs at the speed of the network, while Get or Accumulate of many bytes reaches half of this speed or
less. Each rank has one window:

            headers                   words                        vectors
    client  replies, one per server   extra words of a reply       the vector
    server  requests, one per client  announced numbers, one per   request buffers, one per client
                                      client

To send a vector, a client first announces the number of its request, and puts the vector into its buffer at the server.
It flushes, and then puts the header. The server puts the reply's vector straight into the client's vector, flushes, and
puts the header of the reply.

Both poll the headers in their own memory with plain loads while another rank writes them with Put. That is correct:

- The window has the unified memory model, which ``is_unified`` checks. Data that was put therefore becomes visible to
loads without further RMA calls by the receiver, such as ``Win.Sync``. MPI makes progress because the waiting rank calls
it.
  A poll therefore detects a new header eventually.
- A header may be seen when only some of its words have arrived. The header counts only if its checksum over all other
words is right.
- A vector is complete when its header is seen. Before the sender puts the header, it flushes the vector, that is, waits
until the vector is in the receiver's memory.

A slot is reused when its content is no longer needed. A client sends a request to a server only after the reply to the
previous request. A server has read a request when it replies. Each rank therefore has one slot per peer, and a sequence
number distinguishes a new header from the previous one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...core.layout import Array
from ..mpi import MPI, mpi_type
from .coding import Decoder, Encoder
from .interface import EMPTY, HEADER, MESSAGE, Routes, has_arrived, make_header, reply_backoff

_WORD = 8  # bytes
_LINE = 64  # bytes of a cache line
_PROBE_S = 5.0


class _Offsets(NamedTuple):
    """The byte offsets in a rank's window.

    Attributes:
        words: Offset of the words after the headers.
        vectors: Offset of the vectors, which begin on a cache line.
    """

    words: int
    vectors: int


def _offsets(routes: Routes, rank: int) -> _Offsets:
    n_headers, n_words = len(routes.servers(rank)), routes.n_extra
    if rank in routes.clients:
        n_headers = n_words = len(routes.clients[rank])
    words = n_headers * HEADER * _WORD
    return _Offsets(words, -(-(words + n_words * _WORD) // _LINE) * _LINE)


class Window:
    """The memory of a rank, and puts into other ranks' memory. Construction and ``free`` are collective over the ranks.

    Args:
        nbytes: Size of the vectors in bytes.

    Attributes:
        headers: Shape (n, HEADER), int64.
        words: Shape (n,), int64.
        vectors: Shape (nbytes,), uint8.

    Raises:
        MPI.Exception: The window cannot be created.
    """

    def __init__(self, routes: Routes, nbytes: int) -> None:
        self._routes = routes
        offsets = self._offsets = [_offsets(routes, rank) for rank in range(routes.comm.size)]
        own = offsets[routes.comm.rank]
        raw = np.zeros(own.vectors + nbytes + 2 * _LINE, np.uint8)
        memory = raw[-raw.ctypes.data % _LINE :]
        self.headers = memory[: own.words].view(np.int64).reshape(-1, HEADER)
        self.words = memory[own.words : own.vectors].view(np.int64)
        self.vectors = memory[own.vectors : own.vectors + nbytes]
        self._probed = np.zeros(_WORD, np.uint8)
        self._probes: list[MPI.Request] = []
        self._win = MPI.Win.Create(memory, 1, MPI.INFO_NULL, routes.comm)
        self._win.Lock_all(MPI.MODE_NOCHECK)

    @property
    def is_unified(self) -> bool:
        """Whether plain loads see data that was put, as this transport requires."""
        return bool(self._win.model == MPI.WIN_UNIFIED)

    def progresses(self) -> bool:
        """Return whether workers can read a word of each server's memory while all let MPI progress. Collective."""
        probe, comm = [self._probed, MPI.BYTE], self._routes.comm
        servers = self._routes.servers(comm.rank)
        waiting = self._probes = [self._win.Rget(probe, server, [0, _WORD, MPI.BYTE]) for server in servers]
        deadline = time.monotonic() + _PROBE_S
        barrier: MPI.Request | None = None
        ok = True
        while barrier is None or not barrier.Test():
            if barrier is None and (not waiting or MPI.Request.Testall(waiting) or time.monotonic() > deadline):
                ok = not waiting or bool(MPI.Request.Testall(waiting))
                barrier = comm.Ibarrier()
            time.sleep(50e-6)
        return bool(comm.allreduce(ok, op=MPI.LAND))

    def put_header(self, header: Array, rank: int, slot: int) -> None:
        """Put a header into a slot of a rank, and wait until it is there; ``flush`` vectors and words before."""
        self._put(header, rank, slot * HEADER * _WORD)
        self._win.Flush(rank)

    def put_words(self, words: Array, rank: int, index: int = 0) -> None:
        """Put words into the words of another rank, from ``index`` on."""
        self._put(words, rank, self._offsets[rank].words + index * _WORD)

    def put_vector(self, values: Array, rank: int, at: int) -> None:
        """Put values into the vectors of a rank, from byte ``at`` on."""
        self._put(values, rank, self._offsets[rank].vectors + at)

    def flush(self, rank: int) -> None:
        """Wait until everything that was put is in the memory of a rank."""
        self._win.Flush(rank)

    def sync(self) -> None:
        """Make the data that has arrived visible to the following loads."""
        self._win.Sync()

    def free(self) -> None:
        """Free the window. Collective over the ranks."""
        self._win.Unlock_all()
        self._win.Free()

    def _put(self, array: Array, rank: int, at: int) -> None:
        kind = mpi_type(array.dtype)
        self._win.Put([array, kind], rank, [at, array.size, kind])


class WindowClient:
    """``RpcClient`` by windows."""

    def __init__(self, routes: Routes) -> None:
        rank = routes.comm.rank
        self._servers = routes.servers(rank)
        self._slots = {server: routes.clients[server].index(rank) for server in self._servers}
        self._request_nbytes = {server: routes.request_nbytes(server) for server in self._servers}
        self._numbers = np.zeros(len(self._servers), np.int64)
        self._encoder, self._waiting = Encoder(routes), reply_backoff(routes)
        self.residual = self._encoder.residual
        self.window = Window(routes, routes.size * routes.dtype.itemsize if self._servers else 0)
        self.vector = self.window.vectors.view(routes.dtype)
        self.extra = self.window.words[: routes.n_extra if self._servers else 0]

    def send_request(self, server: int, kind: int, message: Array = EMPTY, vector: Array | None = None) -> None:
        index, slot = self._servers.index(server), self._slots[server]
        self._numbers[index] += 1
        if vector is not None:
            self.window.put_words(self._numbers[index : index + 1], server, slot)
            at = slot * self._request_nbytes[server]
            for piece in self._encoder.encode(vector, server):
                self.window.put_vector(piece, server, at)
                at += piece.nbytes
            self.window.flush(server)  # before the header announces the vector
        self.window.put_header(make_header(int(self._numbers[index]), kind, message), server, slot)

    def wait_reply(self, server: int) -> Array:
        index = self._servers.index(server)
        headers, number = self.window.headers, int(self._numbers[index])
        self._waiting.until(lambda spins: has_arrived(headers, index, number), blocking_rank=lambda: server)
        self.window.sync()
        return headers[index, MESSAGE].copy()  # the next reply overwrites the header

    def free(self) -> None:
        self.window.free()


class WindowServer:
    """``RpcServer`` by windows."""

    def __init__(self, routes: Routes) -> None:
        rank = routes.comm.rank
        self._comm, self._clients = routes.comm, routes.clients[rank]
        self._slots = {client: routes.servers(client).index(rank) for client in self._clients}
        self._ranges, self._itemsize = routes.ranges[rank], routes.dtype.itemsize
        self._numbers = np.zeros(len(self._clients), np.int64)  # numbers of the last requests
        self._decoder = Decoder(routes)
        self.window = Window(routes, len(self._clients) * routes.request_nbytes(rank))
        self._announced = self.window.words[: len(self._clients)]  # numbers of requests whose vectors are being sent
        self._buffers = self.window.vectors.reshape(len(self._clients), -1) if self._clients else self.window.vectors

    def requests(self) -> Iterator[tuple[int, int, Array]]:
        self._comm.Iprobe()
        headers = self.window.headers
        for index, client in enumerate(self._clients):
            if has_arrived(headers, index, self._numbers[index] + 1):
                self.window.sync()
                self._numbers[index] += 1
                header = headers[index].copy()
                yield client, int(header[1]), header[MESSAGE]

    def is_receiving(self) -> bool:
        return bool((self._announced > self._numbers).any())

    def request_vector(self, client: int) -> Array:
        return self._decoder.decode(self._buffers[self._clients.index(client)], client)

    def send_reply(
        self, client: int, message: Array = EMPTY, vector: Array | None = None, extra: Array | None = None
    ) -> None:
        if vector is not None:
            for lo, hi in self._ranges:
                self.window.put_vector(vector[lo:hi], client, lo * self._itemsize)
        if extra is not None:
            self.window.put_words(extra, client)
        if vector is not None or extra is not None:
            self.window.flush(client)
        number = int(self._numbers[self._clients.index(client)])
        self.window.put_header(make_header(number, 0, message), client, self._slots[client])

    def free(self) -> None:
        self.window.free()
