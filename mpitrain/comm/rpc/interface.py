"""The roles of client and server, the ranks that have them, and the headers of their requests and replies.

A header is a sequence number, a kind, a message, and a checksum in the last word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...core.kernels import kernel
from ...core.layout import Array
from ...core.ranges import Range
from ..backoff import Backoff
from ..mpi import MPI
from ..vector_codec import VectorCodec

EMPTY = np.zeros((), [])  # a message without fields
HEADER = 16  # words
MESSAGE = slice(2, HEADER - 1)
_YIELD_S = 2e-3  # time that a worker polls for a reply before it sleeps, in addition to the vector's transfer time
_SLOW_BYTES_PER_S = 0.5e9


@dataclass(frozen=True)
class Routes:
    """The pairs of ranks that communicate.

    Attributes:
        comm: All ranks.
        clients: For each server's rank, the ranks of its clients: workers on other nodes.
        ranges: For each server's rank, its ranges of the vector.
        size: Length of the vector.
        dtype: Data type of its elements.
        n_extra: Words that a reply may carry in addition to a vector, such as worker statistics.
        codec: Encodes vectors that are sent to servers; None if they are sent unchanged.
        replies_only: Whether vectors are sent in replies only, so that servers need no memory for them.
    """

    comm: MPI.Intracomm
    clients: dict[int, list[int]]
    ranges: dict[int, Sequence[Range]]
    size: int
    dtype: np.dtype[Any]
    n_extra: int
    codec: VectorCodec | None = None
    replies_only: bool = False

    @property
    def is_server(self) -> bool:
        """Whether this rank is a server."""
        return self.comm.rank in self.clients

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


class RpcClient(Protocol):
    """A worker's end, which one thread of the worker uses.

    Attributes:
        vector: Receives vectors from servers, shape (size,).
        extra: Receives the words that a reply carries, shape (n_extra,), int64.
        residual: The error of the compression, to be added to the next vector, shape (size,); shape (0,) without
            compression.
    """

    vector: Array
    extra: Array
    residual: Array

    def send_request(self, server: int, kind: int, message: Array = EMPTY, vector: Array | None = None) -> None:
        """Send a request with the server's ranges of ``vector``, shape (size,); ``wait_reply`` must follow.

        With ``Routes.codec`` the vector is encoded, and the error is added to the next vector.

        Args:
            message: Shape (), a structured dtype of at most 104 bytes.
        """

    def wait_reply(self, server: int) -> Array:
        """Wait for the reply to the last request; its data is then in ``vector`` and ``extra``.

        Returns:
            The bytes of the message, for ``unpack``.
        """

    def free(self) -> None:
        """Free memory. Collective over all ranks, with the servers' method."""


class RpcServer(Protocol):
    """A server's end, which one thread of the server uses."""

    def requests(self) -> Iterator[tuple[int, int, Array]]:
        """Yield the client's rank, kind and message (for ``unpack``) of each request that has arrived.

        Lets MPI progress. ``MessageServer`` waits for the vector of a request whose header has arrived.
        """

    def is_receiving(self) -> bool:
        """Return whether a request is announced but has not arrived, so that MPI should progress."""

    def request_vector(self, client: int) -> Array:
        """Return the vector of a client's request: this server's ranges, concatenated."""

    def send_reply(
        self, client: int, message: Array = EMPTY, vector: Array | None = None, extra: Array | None = None
    ) -> None:
        """Reply to the last request of a client, with this server's ranges of ``vector`` and with ``extra``.

        ``WindowServer`` waits until the client has received the data; a stopped client blocks the server.
        """

    def free(self) -> None:
        """Free memory. Collective over all ranks, with the clients' method."""


def unpack(message: Array, dtype: np.dtype[Any]) -> Any:
    """Return the record of this dtype that was sent as a message."""
    return message.view(np.uint8)[: dtype.itemsize].view(dtype)[0] if dtype.itemsize else EMPTY[()]


def make_header(number: int, kind: int, message: Array) -> Array:
    """Return the header of a request or a reply, int64, shape (HEADER,).

    Args:
        message: Shape (), a structured dtype of at most 104 bytes.
    """
    words = np.zeros(HEADER, np.int64)
    words[0], words[1] = number, kind
    if message.nbytes:
        words[MESSAGE].view(np.uint8)[: message.nbytes] = message.reshape(1).view(np.uint8)
    words[-1] = _checksum(words)
    return words


@kernel
def has_arrived(headers: Array, index: int, number: int) -> bool:
    """Return whether a header with this sequence number is complete in ``headers[index]``."""
    return headers[index, 0] == number and headers[index, -1] == _checksum(headers[index])  # type: ignore[no-any-return]


@kernel
def _checksum(words: Array) -> int:
    total = np.uint64(0x9E3779B97F4A7C15)
    for i in range(words.size - 1):
        total = (total ^ np.uint64(words[i])) * np.uint64(0xBF58476D1CE4E5B9)
        total ^= total >> np.uint64(31)
    return np.int64(total >> np.uint64(1))  # type: ignore[no-any-return]


def reply_backoff(routes: Routes) -> Backoff:
    """Return how a worker waits for replies."""
    # Do not spin, and sleep late: MPI makes no progress while this rank spins or sleeps, which delays data.
    capacity = max((routes.capacity(server) for server in routes.servers(routes.comm.rank)), default=0)
    yield_s = _YIELD_S + capacity * routes.dtype.itemsize / _SLOW_BYTES_PER_S
    return Backoff(oversubscribed=True, progress=routes.comm.Iprobe, yield_s=yield_s)
