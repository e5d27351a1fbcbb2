"""Messages that the ranks of a process set send at any time, also between two cycles.

- ``ask`` requests that the other ranks take part in the next cycle, even if they have no pending operation. The sender
  has waited for long, and needs to know which ranks have not submitted its operations.
- ``leave`` says that the sender takes part in no cycle after the first n. It shuts down, or has failed.
- ``free`` is the answer to all ranks that leave: the sender now frees the set's memory, or does not free it, because a
  rank has not left.
"""

from __future__ import annotations

import time
from time import perf_counter
from typing import Any

import numpy as np

from ..comm.mpi import MPI

_ASK, _LEAVE, _FREE = 1, 2, 3  # tags
_ANSWER_S = 60.0  # maximum time for ranks that leave to report whether they free the memory


class Notices:
    """The messages of one rank. Every method is local.

    Args:
        comm: Communicator of the set's ranks; nothing else is sent on it.

    Attributes:
        asked: Whether another rank has sent "ask".
        left: For each rank that has left, the number of cycles in which it has taken part.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.asked = False
        self.left: dict[int, int] = {}
        self._frees: dict[int, bool] = {}
        self._sent: list[MPI.Request] = []

    def ask(self) -> None:
        """Request that the other ranks take part in the next cycle."""
        self._send(_ASK, 0)

    def leave(self, cycles: int) -> None:
        """Notify the other ranks that this rank leaves, and after how many cycles."""
        self._send(_LEAVE, cycles)

    def receive(self) -> None:
        """Receive the messages that other ranks have sent."""
        status, word = MPI.Status(), np.zeros(1, np.int64)
        while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            source, tag = status.Get_source(), status.Get_tag()
            self._comm.Recv(word, source, tag)
            if tag == _LEAVE:
                self.left[source] = int(word[0])
            elif tag == _FREE:
                self._frees[source] = bool(word[0])
            else:
                self.asked = True

    def agree_to_free(self, can_free: bool, until: float) -> bool:
        """Return whether all ranks have left and free the set's memory; the same on all ranks, which must call this.

        Args:
            can_free: Whether this rank can free the memory.
            until: The latest time to wait for ranks that have not left, on the clock of ``perf_counter``.
        """
        have_all_left = self._receive_from_all(self.left, until)
        self._frees[self._comm.rank] = have_all_left and can_free
        self._send(_FREE, self._frees[self._comm.rank])
        if not (have_all_left and self._receive_from_all(self._frees, until + _ANSWER_S)):
            return False
        if not all(self._frees.values()):
            return False
        MPI.Request.Waitall(self._sent)
        return True

    def _send(self, tag: int, value: int) -> None:
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._sent.append(self._comm.Isend(np.full(1, value, np.int64), rank, tag))

    def _receive_from_all(self, received: dict[int, Any], until: float) -> bool:
        """Wait until all other ranks are in ``received``; return whether this happened before ``until``."""
        others = set(range(self._comm.size)) - {self._comm.rank}
        while others - received.keys() and perf_counter() < until:
            self.receive()
            time.sleep(1e-3)
        return not others - received.keys()
