"""Blocks of tensors that the ranks of a node pass to each other through shared memory.

Each rank has two buffers. An operation passes a tensor block by block. For every block a rank writes its buffer and
publishes a phase of the node's barrier. When all ranks have published the phase, the rank reads the others' buffers.
Blocks alternate between the two buffers, so one wait per block is enough:

    rank writes block k+2 into the buffer of block k
      after it has seen phase k+1 of all ranks,
      which each rank publishes only after it has read block k.

Signatures and texts of operations alternate between two places in the same way, one for every operation.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from ..comm.atomics import WORDS
from ..comm.hierarchy import Hierarchy
from ..core.kernels import kernel
from ..core.layout import PAGE, Array
from ..process.pid import process_state

_PID, _NAMESPACE, _ENDED = 2, 3, 4  # words 0 and 1 are signatures
TEXT_BYTES = 512
_SHARED_BYTES = 32 << 20  # maximum total size of a node's buffers if there are many ranks
_LARGEST_BLOCK, _SMALLEST_BLOCK = 1 << 20, 64 << 10  # bytes


def block_bytes(node_size: int) -> int:
    """Return the size of a buffer; a multiple of the page size. Buffers of few ranks fit into the L3 cache."""
    share = _SHARED_BYTES // (2 * max(1, node_size)) // PAGE * PAGE
    return min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, share))


def shared_bytes_per_rank(node_size: int) -> int:
    """Return the bytes of shared memory that a rank's buffers need."""
    return 2 * block_bytes(node_size) + 2 * PAGE


@kernel
def _disagrees(words: Array, n: int, at: int) -> bool:
    for rank in range(1, n):
        if words[rank * WORDS + at] != words[at]:
            return True
    return False


class Staging:
    """Buffers, signatures and the state of a node's ranks. Construction is collective over the node.

    Attributes:
        rank, size: This rank's index on its node, and the number of the node's ranks.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        self.rank, self.size = hierarchy.node.rank, hierarchy.node.size
        self.barrier = hierarchy.barrier
        self.block_bytes = block_bytes(self.size)
        shared = hierarchy.shared
        self._words = shared.allocate((self.size * WORDS,), np.int64)
        self._texts = shared.allocate((2, self.size, TEXT_BYTES), np.uint8)
        self._own_texts = [memoryview(rows[self.rank]) for rows in self._texts]
        own = self._words[self.rank * WORDS : (self.rank + 1) * WORDS]
        own[:] = 0
        own[_PID], own[_NAMESPACE] = os.getpid(), _pid_namespace()
        self._own = memoryview(own)  # type: ignore[arg-type]
        self._memory = torch.from_numpy(shared.allocate((2, self.size, self.block_bytes), np.uint8))
        self._rows: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        self._buffer = 0
        hierarchy.node.Barrier()  # all words are initialized

    def next_buffers(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the buffers of all ranks for the next block, each of shape (block_bytes / itemsize,).

        This rank may write its own buffer now, and read the others' buffers when all ranks have published.
        """
        self._buffer ^= 1
        return self.buffers(dtype)

    def buffers(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the buffers of all ranks for the current block."""
        rows = self._rows.get(dtype)
        if rows is None:
            typed = self._memory.view(dtype)
            rows = self._rows[dtype] = (list(typed[0].unbind()), list(typed[1].unbind()))
        return rows[self._buffer]

    def publish(self) -> int:
        """Announce that this rank's buffer is written; return the phase to wait for."""
        return self.barrier.advance()

    def sign(self, operation: int, text: bytes, signature: int) -> None:
        """Set the text and the signature of this rank's operation; they are visible with the next published phase.

        Args:
            text: At most ``TEXT_BYTES`` bytes; ends with a zero byte.
        """
        self._own[operation & 1] = signature
        self._own_texts[operation & 1][: len(text)] = text

    def disagrees(self, operation: int) -> bool:
        """Return whether the ranks have signed different operations; call after waiting for a phase of an operation."""
        return _disagrees(self._words, self.size, operation & 1)  # type: ignore[no-any-return]

    def texts(self, operation: int) -> list[str]:
        """Return the texts of the ranks' operations; call after ``disagrees``."""
        return [row.tobytes().split(b"\0", 1)[0].decode(errors="replace") for row in self._texts[operation & 1]]

    def mark_ended(self) -> None:
        """Announce that this rank takes part in no further operations."""
        self._own[_ENDED] = 1

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank has left, or its process has ended."""
        words = self._words[rank * WORDS : (rank + 1) * WORDS]
        if words[_ENDED]:
            return True
        same_namespace = words[_NAMESPACE] == self._own[_NAMESPACE]
        return bool(same_namespace) and process_state(int(words[_PID])) in ("", "Z", "X")

    def behind(self) -> list[int]:
        """Return the ranks that have not published this rank's phase."""
        return self.barrier.behind(self.barrier.phase)

    def is_behind(self) -> bool:
        """Return whether a rank has published a later phase than this rank."""
        return self.barrier.any_reached(self.barrier.phase + 1)


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return os.getpid()  # a unique value: process ids of different namespaces cannot be compared
