"""The roles of client and server, and the ranks that have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...core.layout import Array
from ...core.ranges import Range
from ..mpi import MPI
from ..vector_codec import VectorCodec

EMPTY = np.zeros((), [])  # a message without fields


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
