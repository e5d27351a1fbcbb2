"""Requests and replies between workers and the servers on other nodes, with vectors beside them.

A worker has one request under way to a server at a time. With windows (``WindowTransport``) everything is put: the vector
into the worker's own mailbox at the server, then a header of a few words beside it, and likewise back, straight to
where the worker computes with it. Who waits looks at its own memory and lets MPI progress meanwhile. (Across nodes a
Put runs at the speed of the network, and a Get or an Accumulate of many bytes at a half or less of it.) Where windows
cannot be had or make no progress, messages (``MessageTransport``) carry the same.

A header is numbered, and summed up in its last word, so that one that has arrived in part is not taken for whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..core.kernels import kernel
from ..core.layout import Array
from ..plan.config import Precision
from .backoff import Backoff
from .compression import Codec
from .mpi import MPI, mpi_type

HEADER = 16  # words: a number, the kind, arguments, a sum
ARGUMENTS = HEADER - 3

Ranges = Sequence[tuple[int, int]]

_REQUEST, _REPLY, _VECTOR, _ROWS = 101, 102, 103, 104  # tags
_PROBE_S = 5.0
_LINE = 64  # bytes of a cache line
_YIELD_S = 2e-3  # that a worker stays awake for a reply, beside the time of its vector
_SLOW_BYTES_PER_S = 0.5e9


@dataclass(frozen=True)
class Routes:
    """Who writes to whom.

    Attributes:
        comm: All ranks.
        clients: For each server's rank, the ranks of its clients: workers on other nodes.
        ranges: For each server's rank, its ranges of the vector.
        size: Length of the vector.
        dtype: Of its elements.
        n_rows: Words that a reply may bring beside a vector, such as accounts.
        precision: Type that vectors to servers are rounded to on their way; None for ``dtype``.
    """

    comm: MPI.Intracomm
    clients: dict[int, list[int]]
    ranges: dict[int, Ranges]
    size: int
    dtype: np.dtype[Any]
    n_rows: int
    precision: Precision | None = None

    def servers(self, worker: int) -> list[int]:
        """Ranks of the servers that a worker writes to."""
        return [server for server, clients in self.clients.items() if worker in clients]

    def capacity(self, server: int) -> int:
        """Elements of a server's ranges."""
        return sum(hi - lo for lo, hi in self.ranges[server])


class RpcTransport(Protocol):
    """One rank's letters; see the module for what they are.

    Attributes:
        vector: On a worker: where vectors from servers arrive, shape (size,).
        rows: On a worker: where words beside a reply arrive, shape (n_rows,), int64.
    """

    vector: Array
    rows: Array

    def request(self, server: int, kind: int, arguments: Sequence[float], vector: Array | None = None) -> None:
        """Worker: ask a server, sending it its ranges of ``vector``, shape (size,); ``reply`` follows.

        With ``Routes.precision`` they are rounded, and what that leaves out is added to the next vector.

        Arguments are integers, or floats that go as their bits (see ``float_of``).
        """

    def reply(self, server: int) -> list[int]:
        """Worker: wait for the reply to the last request; what it brings is in ``vector`` and ``rows`` then."""

    def requests(self) -> Iterator[tuple[int, int, list[int]]]:
        """Server: what has arrived: each client's rank, kind and arguments. Lets MPI progress."""

    def is_receiving(self) -> bool:
        """Server: whether something is on its way here that has not arrived, so that MPI should progress."""

    def mailbox(self, client: int) -> Array:
        """Server: the vector that came with a client's request: this server's ranges, one behind the other."""

    def respond(
        self, client: int, arguments: Sequence[float], vector: Array | None = None, rows: Array | None = None
    ) -> None:
        """Server: reply, with this server's ranges of ``vector`` and with ``rows``."""

    def free(self) -> None:
        """Give memory back; collective over the ranks."""


def float_of(word: int) -> float:
    """The float that was given as an argument."""
    return float(np.array([word], np.int64).view(np.float64)[0])


def _words(number: int, kind: int, arguments: Sequence[float]) -> Array:
    words = np.zeros(HEADER, np.int64)
    words[0], words[1] = number, kind
    floats = words.view(np.float64)
    for i, value in enumerate(arguments, 2):
        if isinstance(value, float):
            floats[i] = value
        else:
            words[i] = value
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
    """What both kinds of mail have in common: numbers, ranks, and waiting."""

    def __init__(self, routes: Routes) -> None:
        self._routes, self._comm = routes, routes.comm
        self._rank = routes.comm.rank
        self._servers = routes.servers(self._rank)
        self._clients = routes.clients.get(self._rank, [])
        self._numbers = np.zeros(max(len(self._servers), len(self._clients)), np.int64)
        # Spinning alone does not let MPI progress. Nor does sleeping, and what arrives meanwhile is slow to come.
        capacity = max((routes.capacity(server) for server in self._servers), default=0)
        yield_s = _YIELD_S + capacity * routes.dtype.itemsize / _SLOW_BYTES_PER_S
        self._waiting = Backoff(oversubscribed=True, yield_s=yield_s)
        self._codec = None if routes.precision is None else Codec(routes.precision, routes.dtype)
        self._sent_dtype = routes.dtype if self._codec is None else self._codec.wire
        coded = self._codec is not None
        self._wire = np.zeros(routes.size if coded and self._servers else 0, self._sent_dtype)
        self._residual = np.zeros(len(self._wire), routes.dtype)
        held = routes.capacity(self._rank) if coded and self._clients else 0
        self._decoded = {client: np.zeros(held, routes.dtype) for client in self._clients}

    def _as_sent(self, vector: Array, server: int) -> Array:
        """A vector whose ranges of this server's are to be sent, in the type that travels."""
        if self._codec is None:
            return vector
        for lo, hi in self._routes.ranges[server]:
            self._codec.encode(vector[lo:hi], self._residual[lo:hi], self._wire[lo:hi])
        return self._wire

    def _as_read(self, mailbox: Array, client: int) -> Array:
        """What has arrived from a client, in the vectors' type."""
        if self._codec is None:
            return mailbox
        self._codec.decode(mailbox, self._decoded[client])
        return self._decoded[client]

    def _wait(self, arrived: Callable[[], bool]) -> None:
        self._waiting.until(lambda spins: arrived(), self._progress)

    def _progress(self) -> None:
        self._comm.Iprobe()


class WindowTransport(_TransportBase):
    """``RpcTransport`` by RMA windows. Construction and ``free`` are collective over the ranks.

    Raises:
        MPI.Exception: A window cannot be had.
    """

    def __init__(self, routes: Routes) -> None:
        super().__init__(routes)
        self._itemsize = routes.dtype.itemsize
        count = self._header_count(self._rank)
        is_worker = bool(self._servers)
        words = self._vectors_at(self._rank) // 8
        kept = routes.dtype if is_worker else self._sent_dtype
        elements = routes.size
        if not is_worker:
            elements = len(self._clients) * self._capacity(self._rank) if self._clients else 0
        raw = np.zeros(words * 8 + elements * kept.itemsize + 2 * _LINE, np.uint8)
        self._memory = raw[-raw.ctypes.data % _LINE :]  # so that vectors begin on a cache line
        self._headers = self._memory[: count * HEADER * 8].view(np.int64).reshape(count, HEADER)
        # Behind the headers: a worker's rows; and a server's bells, the numbers of requests whose vectors are coming.
        behind = self._memory[count * HEADER * 8 :]
        self.rows = behind[: routes.n_rows * 8 if is_worker else 0].view(np.int64)
        self._announced = behind[: count * 8 if self._clients else 0].view(np.int64)
        vectors = self._memory[words * 8 : words * 8 + elements * kept.itemsize].view(kept)
        self.vector = vectors
        self._mailboxes = vectors.reshape(len(self._clients), -1) if self._clients else vectors
        self._probed = np.zeros(8, np.uint8)
        self._probes: list[MPI.Request] = []
        self._win = MPI.Win.Create(self._memory, 1, MPI.INFO_NULL, routes.comm)
        self._win.Lock_all(MPI.MODE_NOCHECK)

    @property
    def unified(self) -> bool:
        """Whether plain loads see what was put, as all of this needs."""
        return bool(self._win.model == MPI.WIN_UNIFIED)

    def progresses(self) -> bool:
        """Whether a worker gets a word from each server's memory, while all let MPI progress; collective."""
        probe = [self._probed, MPI.BYTE]
        waiting = self._probes = [self._win.Rget(probe, server, [0, 8, MPI.BYTE]) for server in self._servers]
        deadline = time.monotonic() + _PROBE_S
        everybody: MPI.Request | None = None
        fine = True
        while everybody is None or not everybody.Test():
            if everybody is None and (not waiting or MPI.Request.Testall(waiting) or time.monotonic() > deadline):
                fine = not waiting or bool(MPI.Request.Testall(waiting))
                everybody = self._comm.Ibarrier()
            time.sleep(50e-6)
        return bool(self._comm.allreduce(fine, op=MPI.LAND))

    def request(self, server: int, kind: int, arguments: Sequence[float], vector: Array | None = None) -> None:
        index = self._servers.index(server)
        slot = self._routes.clients[server].index(self._rank)
        self._numbers[index] += 1
        if vector is not None:
            self._put(self._numbers[index : index + 1], server, self._bell_at(server, slot))
            sent, itemsize = self._as_sent(vector, server), self._sent_dtype.itemsize
            at = self._vectors_at(server) + slot * self._capacity(server) * itemsize
            for lo, hi in self._routes.ranges[server]:
                self._put(sent[lo:hi], server, at)
                at += (hi - lo) * itemsize
            self._win.Flush(server)  # before the header says that it is there
        self._put_header(_words(int(self._numbers[index]), kind, arguments), server, slot)

    def reply(self, server: int) -> list[int]:
        index = self._servers.index(server)
        number = int(self._numbers[index])
        self._wait(lambda: _arrived(self._headers, index, number))
        self._win.Sync()
        return self._headers[index, 2:-1].tolist()  # type: ignore[no-any-return]

    def requests(self) -> Iterator[tuple[int, int, list[int]]]:
        self._progress()
        for index, client in enumerate(self._clients):
            if _arrived(self._headers, index, self._numbers[index] + 1):
                self._win.Sync()
                self._numbers[index] += 1
                words = self._headers[index].tolist()
                yield client, words[1], words[2:-1]

    def is_receiving(self) -> bool:
        return bool((self._announced > self._numbers).any())

    def mailbox(self, client: int) -> Array:
        return self._as_read(self._mailboxes[self._clients.index(client)], client)

    def respond(
        self, client: int, arguments: Sequence[float], vector: Array | None = None, rows: Array | None = None
    ) -> None:
        index = self._clients.index(client)
        if vector is not None:
            at = self._vectors_at(client)
            for lo, hi in self._routes.ranges[self._rank]:
                self._put(vector[lo:hi], client, at + lo * self._itemsize)
        if rows is not None:
            self._put(rows, client, self._header_count(client) * HEADER * 8)
        if vector is not None or rows is not None:
            self._win.Flush(client)
        slot = self._routes.servers(client).index(self._rank)
        self._put_header(_words(int(self._numbers[index]), 0, arguments), client, slot)

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

    def _bell_at(self, server: int, slot: int) -> int:
        return (self._header_count(server) * HEADER + slot) * 8

    def _vectors_at(self, rank: int) -> int:
        """Where a rank's vectors begin, in bytes: behind the headers, and a worker's rows or a server's bells."""
        count = self._header_count(rank)
        nbytes = (count * HEADER + (count if rank in self._routes.clients else self._routes.n_rows)) * 8
        return -(-nbytes // _LINE) * _LINE

    def _capacity(self, server: int) -> int:
        return self._routes.capacity(server)


class MessageTransport(_TransportBase):
    """``RpcTransport`` by messages, for where windows do not work."""

    def __init__(self, routes: Routes) -> None:
        super().__init__(routes)
        self.vector = np.zeros(routes.size if self._servers else 0, routes.dtype)
        self.rows = np.zeros(routes.n_rows, np.int64)
        capacity = routes.capacity(self._rank) if self._clients else 0
        self._mailboxes = {client: np.zeros(capacity, self._sent_dtype) for client in self._clients}
        self._sending: list[tuple[MPI.Request, Array]] = []  # what is under way must be kept

    def request(self, server: int, kind: int, arguments: Sequence[float], vector: Array | None = None) -> None:
        self._send(_words(int(vector is not None), kind, arguments), server, _REQUEST)
        if vector is not None:
            self._send(self._compact(self._as_sent(vector, server), server), server, _VECTOR)

    def reply(self, server: int) -> list[int]:
        self._wait(lambda: self._comm.Iprobe(server, _REPLY))
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
        return words[2:-1].tolist()  # type: ignore[no-any-return]

    def requests(self) -> Iterator[tuple[int, int, list[int]]]:
        status = MPI.Status()
        while self._clients and self._comm.Iprobe(MPI.ANY_SOURCE, _REQUEST, status):
            client = status.Get_source()
            words = np.empty(HEADER, np.int64)
            self._comm.Recv(words, client, _REQUEST)
            if words[0]:
                self._comm.Recv(self._mailboxes[client], client, _VECTOR)
            yield client, int(words[1]), words[2:-1].tolist()

    def is_receiving(self) -> bool:
        return False

    def mailbox(self, client: int) -> Array:
        return self._as_read(self._mailboxes[client], client)

    def respond(
        self, client: int, arguments: Sequence[float], vector: Array | None = None, rows: Array | None = None
    ) -> None:
        self._send(_words((vector is not None) + 2 * (rows is not None), 0, arguments), client, _REPLY)
        if vector is not None:
            self._send(self._compact(vector, self._rank), client, _VECTOR)
        if rows is not None:
            self._send(rows, client, _ROWS)

    def free(self) -> None:
        MPI.Request.Waitall([request for request, _ in self._sending])

    def _compact(self, vector: Array, server: int) -> Array:
        return np.concatenate([vector[:0], *(vector[lo:hi] for lo, hi in self._routes.ranges[server])])

    def _send(self, array: Array, target: int, tag: int) -> None:
        # Nobody waits for it: a server that waited for one client would keep the others waiting, who may wait for it.
        self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
        self._sending.append((self._comm.Isend(array, target, tag), array))


_abandoned: list[WindowTransport] = []


def open_transport(routes: Routes, one_sided: bool, say: Callable[[str], None]) -> RpcTransport:
    """Windows where they work, else messages; collective over the ranks. ``say`` is told where they do not."""
    if not one_sided:
        return MessageTransport(routes)
    rpc: WindowTransport | None = None
    problem = ""
    try:
        rpc = WindowTransport(routes)
        if not rpc.unified:
            problem = "windows here have a memory of their own (MPI_WIN_SEPARATE)"
    except MPI.Exception as error:
        problem = f"MPI has no windows here: {error}"
    problems = [found for found in routes.comm.allgather(problem) if found]
    if not problems and rpc is not None:
        if rpc.progresses():
            return rpc
        # Freeing a window waits for what is under way on it, and that would be for ever; nor may its memory go.
        _abandoned.append(rpc)
        problems = ["windows make no progress here"]
    say(f"servers on other nodes are reached by messages: {problems[0]}")
    return MessageTransport(routes)
