"""RPC between workers and parameter servers on other nodes: requests and replies with vectors attached.

A worker has at most one outstanding request per server. ``WindowTransport`` uses RMA Put only: first the vector into
the worker's request buffer at the server, then a header of a few words; replies go straight into the worker's vector
in the same way. A waiting rank polls its own memory and lets MPI progress. (Between nodes Put runs at the speed of the
network, while a Get or Accumulate of many bytes reaches half of it or less.) ``MessageTransport`` sends the same by
point-to-point messages, if windows are not available or make no progress.

A header has a sequence number, a kind, a *message* (a NumPy record of a dtype on which both ends agree) and a checksum
in its last word, so that a partly written one is not accepted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..core.kernels import kernel
from ..core.layout import Array
from .backoff import Backoff
from .mpi import MPI, mpi_type
from .vector_codec import RangeCodec, VectorCodec

HEADER = 16  # words: sequence number, kind, message, checksum
_MESSAGE = slice(2, HEADER - 1)
EMPTY = np.zeros((), [])  # a message without fields
_NO_BYTES = np.zeros(0, np.uint8)

Ranges = Sequence[tuple[int, int]]

_REQUEST, _REPLY, _VECTOR, _ROWS = 101, 102, 103, 104  # tags
_PROBE_S = 5.0
_LINE = 64  # bytes of a cache line
_YIELD_S = 2e-3  # how long a worker polls for a reply before sleeping, in addition to its vector's transfer time
_SLOW_BYTES_PER_S = 0.5e9


@dataclass(frozen=True)
class Routes:
    """Which ranks communicate with which.

    Attributes:
        comm: All ranks.
        clients: For each server's rank, the ranks of its clients: workers on other nodes.
        ranges: For each server's rank, its ranges of the vector.
        size: Length of the vector.
        dtype: Data type of its elements.
        n_rows: Words that a reply may carry in addition to a vector, such as worker statistics.
        codec: Encodes vectors that are sent to servers; None if they are sent unchanged.
        replies_only: Whether vectors are sent in replies only, so that servers need no memory for them.
    """

    comm: MPI.Intracomm
    clients: dict[int, list[int]]
    ranges: dict[int, Ranges]
    size: int
    dtype: np.dtype[Any]
    n_rows: int
    codec: VectorCodec | None = None
    replies_only: bool = False

    def servers(self, worker: int) -> list[int]:
        """Return the ranks of the servers that a worker sends to."""
        return [server for server, clients in self.clients.items() if worker in clients]

    def capacity(self, server: int) -> int:
        """Return the number of elements in a server's ranges."""
        return sum(hi - lo for lo, hi in self.ranges[server])

    def request_nbytes(self, server: int) -> int:
        """Return the number of bytes in which a vector is sent to a server."""
        if self.replies_only:
            return 0
        if self.codec is None:
            return self.capacity(server) * self.dtype.itemsize
        return sum(self.codec.of_range(lo, hi).nbytes for lo, hi in self.ranges[server])


class RpcTransport(Protocol):
    """One rank's RPC endpoint; see the module's description.

    Attributes:
        vector: On a worker: receives vectors from servers, shape (size,).
        rows: On a worker: receives the words that a reply carries, shape (n_rows,), int64.
        residual: On a worker: the error of the compression, to be added to the next vector, shape (size,); shape (0,)
            without compression.
    """

    vector: Array
    rows: Array
    residual: Array

    def request(self, server: int, kind: int, message: Array = EMPTY, vector: Array | None = None) -> None:
        """Worker: send a request with the server's ranges of ``vector``, shape (size,); ``reply`` must follow.

        With ``Routes.codec`` the vector is encoded, and the error is added to the next one.

        Args:
            message: Shape (), a structured dtype of at most 104 bytes.
        """

    def reply(self, server: int) -> Array:
        """Worker: wait for the reply to the last request; its data is then in ``vector`` and ``rows``.

        Returns:
            The bytes of the message, for ``unpack``.
        """

    def requests(self) -> Iterator[tuple[int, int, Array]]:
        """Server: yield the client's rank, kind and message (for ``unpack``) of each request that has arrived.

        Lets MPI progress.
        """

    def is_receiving(self) -> bool:
        """Server: whether a request is announced but has not arrived, so that MPI should progress."""

    def request_vector(self, client: int) -> Array:
        """Server: return the vector of a client's request: this server's ranges, concatenated."""

    def respond(
        self, client: int, message: Array = EMPTY, vector: Array | None = None, rows: Array | None = None
    ) -> None:
        """Server: reply, with this server's ranges of ``vector`` and with ``rows``."""

    def free(self) -> None:
        """Free memory. Collective over the ranks."""


def unpack(message: Array, dtype: np.dtype[Any]) -> Any:
    """Return the record of this dtype that was sent as a message."""
    return message.view(np.uint8)[: dtype.itemsize].view(dtype)[0] if dtype.itemsize else EMPTY[()]


def _header(number: int, kind: int, message: Array) -> Array:
    words = np.zeros(HEADER, np.int64)
    words[0], words[1] = number, kind
    if message.nbytes:
        words[_MESSAGE].view(np.uint8)[: message.nbytes] = message.reshape(1).view(np.uint8)
    words[-1] = _sum_up(words)
    return words


@kernel
def _sum_up(words: Array) -> int:
    total = np.uint64(0x9E3779B97F4A7C15)
    for i in range(words.size - 1):
        total = (total ^ np.uint64(words[i])) * np.uint64(0xBF58476D1CE4E5B9)
        total ^= total >> np.uint64(31)
    return np.int64(total >> np.uint64(1))  # type: ignore[no-any-return]


@kernel
def _arrived(headers: Array, index: int, number: int) -> bool:
    return headers[index, 0] == number and headers[index, -1] == _sum_up(headers[index])  # type: ignore[no-any-return]


class _TransportBase:
    """State shared by both transports: sequence numbers, ranks, and waiting."""

    def __init__(self, routes: Routes) -> None:
        self._routes, self._comm = routes, routes.comm
        self._rank = routes.comm.rank
        self._servers = routes.servers(self._rank)
        self._clients = routes.clients.get(self._rank, [])
        self._numbers = np.zeros(max(len(self._servers), len(self._clients)), np.int64)
        # Neither spinning nor sleeping lets MPI progress, and sleeping delays the arrival of data.
        capacity = max((routes.capacity(server) for server in self._servers), default=0)
        yield_s = _YIELD_S + capacity * routes.dtype.itemsize / _SLOW_BYTES_PER_S
        self._waiting = Backoff(oversubscribed=True, yield_s=yield_s)
        self._request_nbytes = {server: routes.request_nbytes(server) for server in routes.ranges}
        codec, coded = routes.codec, routes.codec is not None
        # By server; empty if vectors are sent unchanged.
        self._codecs: dict[int, list[RangeCodec]] = {}
        if codec is not None:
            self._codecs = {
                server: [codec.of_range(lo, hi) for lo, hi in ranges] for server, ranges in routes.ranges.items()
            }
        self.residual = np.zeros(routes.size if coded and self._servers else 0, routes.dtype)
        encoded = self._servers if coded else []
        self._encoded = {
            server: [np.zeros(part.nbytes, np.uint8) for part in self._codecs[server]] for server in encoded
        }
        held = routes.capacity(self._rank) if coded and self._clients else 0
        self._decoded = {client: np.zeros(held, routes.dtype) for client in self._clients}

    def _encode(self, vector: Array, server: int) -> list[Array]:
        """Return this server's ranges of the vector as they are sent."""
        ranges = self._routes.ranges[server]
        if not self._codecs:
            return [vector[lo:hi] for lo, hi in ranges]
        for (lo, hi), codec, encoded in zip(ranges, self._codecs[server], self._encoded[server], strict=True):
            codec.encode(vector[lo:hi], self.residual[lo:hi], encoded)
        return self._encoded[server]

    def _decode(self, received: Array, client: int) -> Array:
        """Return the vector of a client's request, of which these bytes have arrived."""
        if not self._codecs:
            return received.view(self._routes.dtype)
        decoded, at, start = self._decoded[client], 0, 0
        for (lo, hi), codec in zip(self._routes.ranges[self._rank], self._codecs[self._rank], strict=True):
            codec.decode(received[at : at + codec.nbytes], decoded[start : start + hi - lo])
            at, start = at + codec.nbytes, start + hi - lo
        return decoded

    def _wait(self, server: int, arrived: Callable[[], bool]) -> None:
        self._waiting.until(lambda spins: arrived(), self._progress, lambda: server)

    def _progress(self) -> None:
        self._comm.Iprobe()


class WindowTransport(_TransportBase):
    """``RpcTransport`` with RMA windows. Construction and ``free`` are collective over the ranks.

    Raises:
        MPI.Exception: A window cannot be created.
    """

    def __init__(self, routes: Routes) -> None:
        super().__init__(routes)
        self._itemsize = routes.dtype.itemsize
        count = self._header_count(self._rank)
        is_worker = bool(self._servers)
        words = self._vectors_offset(self._rank) // 8
        nbytes = routes.size * self._itemsize
        if not is_worker:
            nbytes = len(self._clients) * self._request_nbytes[self._rank] if self._clients else 0
        raw = np.zeros(words * 8 + nbytes + 2 * _LINE, np.uint8)
        self._memory = raw[-raw.ctypes.data % _LINE :]  # vectors start on a cache line
        self._headers = self._memory[: count * HEADER * 8].view(np.int64).reshape(count, HEADER)
        # After the headers: on a worker its rows, on a server the numbers of requests whose vectors are being sent.
        after_headers = self._memory[count * HEADER * 8 :]
        self.rows = after_headers[: routes.n_rows * 8 if is_worker else 0].view(np.int64)
        self._announced = after_headers[: count * 8 if self._clients else 0].view(np.int64)
        vectors = self._memory[words * 8 : words * 8 + nbytes]
        self.vector = vectors[: nbytes if is_worker else 0].view(routes.dtype)
        self._request_buffers = vectors.reshape(len(self._clients), -1) if self._clients else vectors
        self._probed = np.zeros(8, np.uint8)
        self._probes: list[MPI.Request] = []
        self._win = MPI.Win.Create(self._memory, 1, MPI.INFO_NULL, routes.comm)
        self._win.Lock_all(MPI.MODE_NOCHECK)

    @property
    def unified(self) -> bool:
        """Whether plain loads see data that was put, as this transport requires."""
        return bool(self._win.model == MPI.WIN_UNIFIED)

    def progresses(self) -> bool:
        """Check that a worker can read a word of each server's memory while all let MPI progress. Collective."""
        probe = [self._probed, MPI.BYTE]
        waiting = self._probes = [self._win.Rget(probe, server, [0, 8, MPI.BYTE]) for server in self._servers]
        deadline = time.monotonic() + _PROBE_S
        barrier: MPI.Request | None = None
        ok = True
        while barrier is None or not barrier.Test():
            if barrier is None and (not waiting or MPI.Request.Testall(waiting) or time.monotonic() > deadline):
                ok = not waiting or bool(MPI.Request.Testall(waiting))
                barrier = self._comm.Ibarrier()
            time.sleep(50e-6)
        return bool(self._comm.allreduce(ok, op=MPI.LAND))

    def request(self, server: int, kind: int, message: Array = EMPTY, vector: Array | None = None) -> None:
        index = self._servers.index(server)
        slot = self._routes.clients[server].index(self._rank)
        self._numbers[index] += 1
        if vector is not None:
            self._put(self._numbers[index : index + 1], server, self._announcement_offset(server, slot))
            at = self._vectors_offset(server) + slot * self._request_nbytes[server]
            for piece in self._encode(vector, server):
                self._put(piece, server, at)
                at += piece.nbytes
            self._win.Flush(server)  # before the header announces it
        self._put_header(_header(int(self._numbers[index]), kind, message), server, slot)

    def reply(self, server: int) -> Array:
        index = self._servers.index(server)
        number = int(self._numbers[index])
        self._wait(server, lambda: _arrived(self._headers, index, number))
        self._win.Sync()
        return self._headers[index, _MESSAGE].copy()  # the next reply overwrites the header

    def requests(self) -> Iterator[tuple[int, int, Array]]:
        self._progress()
        for index, client in enumerate(self._clients):
            if _arrived(self._headers, index, self._numbers[index] + 1):
                self._win.Sync()
                self._numbers[index] += 1
                words = self._headers[index].copy()
                yield client, int(words[1]), words[_MESSAGE]

    def is_receiving(self) -> bool:
        return bool((self._announced > self._numbers).any())

    def request_vector(self, client: int) -> Array:
        return self._decode(self._request_buffers[self._clients.index(client)], client)

    def respond(
        self, client: int, message: Array = EMPTY, vector: Array | None = None, rows: Array | None = None
    ) -> None:
        index = self._clients.index(client)
        if vector is not None:
            at = self._vectors_offset(client)
            for lo, hi in self._routes.ranges[self._rank]:
                self._put(vector[lo:hi], client, at + lo * self._itemsize)
        if rows is not None:
            self._put(rows, client, self._header_count(client) * HEADER * 8)
        if vector is not None or rows is not None:
            self._win.Flush(client)
        slot = self._routes.servers(client).index(self._rank)
        self._put_header(_header(int(self._numbers[index]), 0, message), client, slot)

    def free(self) -> None:
        self._win.Unlock_all()
        self._win.Free()

    def _put_header(self, words: Array, target: int, slot: int) -> None:
        self._put(words, target, slot * HEADER * 8)
        self._win.Flush(target)

    def _put(self, array: Array, target: int, at: int) -> None:
        kind = mpi_type(array.dtype)
        self._win.Put([array, kind], target, [at, array.size, kind])

    def _header_count(self, rank: int) -> int:
        return len(self._routes.clients[rank]) if rank in self._routes.clients else len(self._routes.servers(rank))

    def _announcement_offset(self, server: int, slot: int) -> int:
        return (self._header_count(server) * HEADER + slot) * 8

    def _vectors_offset(self, rank: int) -> int:
        """Return the byte offset of a rank's vectors, after headers and a worker's rows or a server's announcements."""
        count = self._header_count(rank)
        nbytes = (count * HEADER + (count if rank in self._routes.clients else self._routes.n_rows)) * 8
        return -(-nbytes // _LINE) * _LINE


class MessageTransport(_TransportBase):
    """``RpcTransport`` with point-to-point messages, for MPI libraries on which windows do not work."""

    def __init__(self, routes: Routes) -> None:
        super().__init__(routes)
        self.vector = np.zeros(routes.size if self._servers else 0, routes.dtype)
        self.rows = np.zeros(routes.n_rows, np.int64)
        nbytes = self._request_nbytes[self._rank] if self._clients else 0
        self._request_buffers = {client: np.zeros(nbytes, np.uint8) for client in self._clients}
        self._sending: list[tuple[MPI.Request, Array]] = []  # buffers must live until they are sent

    def request(self, server: int, kind: int, message: Array = EMPTY, vector: Array | None = None) -> None:
        self._send(_header(int(vector is not None), kind, message), server, _REQUEST)
        if vector is not None:
            pieces = [piece.view(np.uint8) for piece in self._encode(vector, server)]
            self._send(np.concatenate([_NO_BYTES, *pieces]), server, _VECTOR)

    def reply(self, server: int) -> Array:
        self._wait(server, lambda: self._comm.Iprobe(server, _REPLY))
        words = np.empty(HEADER, np.int64)
        self._comm.Recv(words, server, _REPLY)
        if words[0] & 1:
            compact = np.empty(self._routes.capacity(server), self._routes.dtype)
            self._comm.Recv(compact, server, _VECTOR)
            before = 0
            for lo, hi in self._routes.ranges[server]:
                self.vector[lo:hi] = compact[before : before + hi - lo]
                before += hi - lo
        if words[0] & 2:
            self._comm.Recv(self.rows, server, _ROWS)
        return words[_MESSAGE]

    def requests(self) -> Iterator[tuple[int, int, Array]]:
        status = MPI.Status()
        while self._clients and self._comm.Iprobe(MPI.ANY_SOURCE, _REQUEST, status):
            client = status.Get_source()
            words = np.empty(HEADER, np.int64)
            self._comm.Recv(words, client, _REQUEST)
            if words[0]:
                self._comm.Recv(self._request_buffers[client], client, _VECTOR)
            yield client, int(words[1]), words[_MESSAGE]

    def is_receiving(self) -> bool:
        return False

    def request_vector(self, client: int) -> Array:
        return self._decode(self._request_buffers[client], client)

    def respond(
        self, client: int, message: Array = EMPTY, vector: Array | None = None, rows: Array | None = None
    ) -> None:
        self._send(_header((vector is not None) + 2 * (rows is not None), 0, message), client, _REPLY)
        if vector is not None:
            self._send(self._compact(vector, self._rank), client, _VECTOR)
        if rows is not None:
            self._send(rows, client, _ROWS)

    def free(self) -> None:
        MPI.Request.Waitall([request for request, _ in self._sending])

    def _compact(self, vector: Array, server: int) -> Array:
        return np.concatenate([vector[:0], *(vector[lo:hi] for lo, hi in self._routes.ranges[server])])

    def _send(self, array: Array, target: int, tag: int) -> None:
        # Do not wait for the send: a server blocked on one client would block the others, which may wait for it.
        self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
        self._sending.append((self._comm.Isend(array, target, tag), array))


_log = logging.getLogger(__name__)
_abandoned: list[WindowTransport] = []


def open_transport(routes: Routes, one_sided: bool) -> RpcTransport:
    """Open windows if they work, else messages. Collective over the ranks."""
    if not one_sided:
        return MessageTransport(routes)
    rpc: WindowTransport | None = None
    problem = ""
    try:
        rpc = WindowTransport(routes)
        if not rpc.unified:
            problem = "RMA windows have a separate memory model (MPI_WIN_SEPARATE)"
    except MPI.Exception as error:
        problem = f"MPI cannot create RMA windows: {error}"
    problems = [found for found in routes.comm.allgather(problem) if found]
    if not problems and rpc is not None:
        if rpc.progresses():
            return rpc
        # Freeing the window would wait for ever for pending operations, so keep it and its memory.
        _abandoned.append(rpc)
        problems = ["RMA windows make no progress"]
    _log.info("servers on other nodes are reached by messages: %s", problems[0])
    return MessageTransport(routes)
