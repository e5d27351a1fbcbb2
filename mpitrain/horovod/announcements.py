"""What the ranks of a process set announce to each other in a cycle: requests as numbers, and new requests as text.

An announcement consists of 32-bit words: the number of pairs, the bytes of new requests, and the pairs, each of which
is the number of a request and the number of the operation.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Sequence

import numpy as np
import torch

from ..backend.collectives import Collectives
from ..backend.internode import Condition
from ..backend.members import Members
from ..core.layout import Array
from .request import Request

_WORDS = 1024  # words of a rank's announcement
_HEADER = 2
MOST_PAIRS = (_WORDS - _HEADER) // 2  # of an announcement


class Announcements:
    """The exchange of announcements. Construction is collective over the set's ranks.

    On one node, ranks write announcements to double-buffered shared memory: cycles use two tables in turn. On several
    nodes they are exchanged by an allgather.
    """

    def __init__(self, members: Members, collectives: Collectives) -> None:
        self._members, self._collectives = members, collectives
        self._shared = members.hierarchy.shared.allocate((2, members.size, _WORDS), np.int32)
        self._own = torch.zeros(_WORDS, dtype=torch.int32, device="cpu")
        self._rows = torch.zeros((members.size, _WORDS), dtype=torch.int32, device="cpu")
        self._count = 0

    def exchange(self, pairs: Sequence[int], new: bytes) -> Generator[Condition, None, Array]:
        """Return the announcements of all ranks, one per row. Collective over the set.

        Args:
            pairs: This rank's pairs, one after the other.
            new: The text of this rank's new requests.
        """
        words = [len(pairs) // 2, len(new), *pairs]
        if self._members.on_one_node:
            self._count += 1
            rows: Array = self._shared[self._count & 1]
            rows[self._members.rank, : len(words)] = words
            yield self._members.staging.publish()
            return rows
        self._own.numpy()[: len(words)] = words
        yield from self._collectives.all_gather(self._rows.unbind(), [self._own])
        return self._rows.numpy()

    def exchange_new(self, rows: Array, new: bytes) -> Generator[Condition, None, list[list[Request]]]:
        """Return the new requests of all ranks, after ``exchange`` has returned ``rows``. Collective over the set."""
        lengths: list[int] = rows[:, 1].tolist()
        if not any(lengths):
            return [[] for _ in lengths]
        own = torch.tensor(list(new), dtype=torch.uint8, device="cpu")
        (joined,) = yield from self._collectives.all_gather_rows([own])
        texts = [part.numpy().tobytes() for part in joined.split(lengths)]
        return [[Request(*fields) for fields in pickle.loads(one)] if one else [] for one in texts]


def text_of(new: Sequence[Request]) -> bytes:
    """Return the text of new requests."""
    return pickle.dumps([tuple(request) for request in new]) if new else b""


def pairs_of(rows: Array) -> list[list[list[int]]]:
    """Return the pairs of each rank."""
    return [row[_HEADER : _HEADER + 2 * row[0]].reshape(-1, 2).tolist() for row in rows]


def are_equal(rows: Array) -> bool:
    """Return whether all ranks have announced the same requests, none of which is new."""
    n = _HEADER + 2 * rows[0, 0]
    first = rows[0, :n].tobytes()
    return not rows[0, 1] and all(row[:n].tobytes() == first for row in rows[1:])
