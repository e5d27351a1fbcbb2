"""Transfers over the links of nodes, which all ranks of a node share; rates with bursts."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.layout import Array
from .measurements import LinkTimes


class Senders:
    """The outgoing links of all nodes. Each sends one transfer after the other.

    A link with bursts is a token bucket. After a long enough pause, ``burst_bytes`` are sent as fast as processors move
    them. All other bytes are sent at the link's rate.

    Args:
        count: Number of nodes.
        burst_s_per_byte: Seconds in which processors move a byte.

    Attributes:
        sent: Bytes that each node has sent, shape (count,).
    """

    def __init__(self, link: LinkTimes, count: int, burst_s_per_byte: float = 0.0) -> None:
        self._rate, self._burst = link.node_bytes_per_s, link.burst_bytes
        self._burst_s_per_byte = burst_s_per_byte
        self._free, self._tokens = np.zeros(count), np.full(count, link.burst_bytes)
        self._at = np.zeros(count)
        self.sent = np.zeros(count)

    def send(self, when: Any, nbytes: float) -> Array:
        """Return the times at which each node, from ``when`` on, has sent this number of bytes; shape (count,)."""
        begin = np.maximum(when, self._free)
        tokens = np.minimum(self._burst, self._tokens + self._rate * (begin - self._at))
        at_once = np.minimum(tokens, nbytes)
        self._free = begin + at_once * self._burst_s_per_byte + (nbytes - at_once) / self._rate
        self._tokens, self._at = tokens - at_once, self._free
        self.sent += nbytes
        return self._free.copy()


class Sender:
    """The outgoing, or the incoming, link of one node; see ``Senders``.

    Args:
        scale: Number of equal links that this object represents.
        burst_s_per_byte: See ``Senders``.

    Attributes:
        sent: Bytes that were sent over all of these links.
        scale: As passed.
    """

    def __init__(self, link: LinkTimes, scale: float = 1.0, burst_s_per_byte: float = 0.0) -> None:
        self._burst_s_per_byte = burst_s_per_byte
        self._rate, self._burst = link.node_bytes_per_s * scale, link.burst_bytes
        self._free, self._at, self._tokens = 0.0, 0.0, link.burst_bytes
        self.sent, self.scale = 0.0, scale

    def send(self, when: float, nbytes: float) -> float:
        """Return the time at which this number of bytes is sent, from ``when`` on."""
        begin = max(when, self._free)
        tokens = min(self._burst, self._tokens + self._rate * (begin - self._at))
        at_once = min(tokens, nbytes)
        self._free = self._at = begin + at_once * self._burst_s_per_byte + (nbytes - at_once) / self._rate
        self._tokens = tokens - at_once
        self.sent += nbytes
        return self._free
