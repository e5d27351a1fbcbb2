"""The ranges of a vector as they are sent to a server: unchanged, or encoded with error feedback."""

from __future__ import annotations

import numpy as np

from ...core.layout import Array
from ..vector_codec import RangeCodec
from .interface import Routes


class Encoder:
    """Encodes a worker's vectors.

    Attributes:
        residual: See ``RpcClient``.
    """

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        servers = routes.servers(routes.comm.rank) if routes.codec is not None else []
        self._codecs = {server: _codecs(routes, server) for server in servers}
        self._encoded = {
            server: [np.zeros(codec.nbytes, np.uint8) for codec in codecs] for server, codecs in self._codecs.items()
        }
        self.residual = np.zeros(routes.size if servers else 0, routes.dtype)

    def encode(self, vector: Array, server: int) -> list[Array]:
        """Return a server's ranges of a vector as they are sent."""
        ranges = self._routes.ranges[server]
        if server not in self._codecs:
            return [vector[lo:hi] for lo, hi in ranges]
        for (lo, hi), codec, encoded in zip(ranges, self._codecs[server], self._encoded[server], strict=True):
            codec.encode(vector[lo:hi], self.residual[lo:hi], encoded)
        return self._encoded[server]


class Decoder:
    """Decodes the vectors that a server receives."""

    def __init__(self, routes: Routes) -> None:
        rank = routes.comm.rank
        self._dtype, self._ranges = routes.dtype, routes.ranges[rank]
        self._codecs = _codecs(routes, rank)
        size = routes.capacity(rank) if self._codecs else 0
        self._decoded = {client: np.zeros(size, routes.dtype) for client in routes.clients[rank]}

    def decode(self, received: Array, client: int) -> Array:
        """Return the vector of a client's request, given its bytes."""
        if not self._codecs:
            return received.view(self._dtype)
        decoded, at, start = self._decoded[client], 0, 0
        for (lo, hi), codec in zip(self._ranges, self._codecs, strict=True):
            codec.decode(received[at : at + codec.nbytes], decoded[start : start + hi - lo])
            at, start = at + codec.nbytes, start + hi - lo
        return decoded


def _codecs(routes: Routes, server: int) -> list[RangeCodec]:
    """Return the codecs of a server's ranges; empty if vectors are sent unchanged."""
    return [] if routes.codec is None else [routes.codec.of_range(lo, hi) for lo, hi in routes.ranges[server]]
