"""Messages between two ranks of a process group. They start at once, and are not part of the group's queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from time import perf_counter

from torch import Tensor

from ..comm.backoff import Backoff
from ..comm.mpi import MPI
from ..core import activity
from ..errors import CollectiveFailed
from .host_tensors import copy_back
from .work import TensorWork


class Message(TensorWork):
    """A message that is being sent or received. Every method is local, but ``wait`` needs the other rank.

    Args:
        text: Describes the message in errors.
        requests: The MPI requests, one for each part of the message.
        tensor: The tensor, to which a received message is copied.
        flat: The elements that MPI sends or receives; they must exist until the message is complete.
        nbytes: The size in bytes that the last part of a received message must have; None for a message that is sent.
        has_ended: Returns whether the other rank's process has ended.
    """

    def __init__(
        self,
        text: str,
        requests: list[MPI.Request],
        tensor: Tensor,
        flat: Tensor,
        nbytes: int | None,
        timeout_s: float,
        has_ended: Callable[[], bool],
    ) -> None:
        super().__init__([tensor], threading.Lock())
        self._text, self._requests, self._flat = text, requests, flat
        self._nbytes, self._deadline = nbytes, perf_counter() + timeout_s
        self._has_ended = has_ended
        self._looked, self._source = 0.0, -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the message is complete.

        Raises:
            CollectiveFailed: The message timed out or has the wrong size, or the other rank has ended.
        """
        if timeout is not None and timeout > timedelta(0):
            self._deadline = perf_counter() + timeout.total_seconds()
        if not self.done:
            with activity.waiting():
                Backoff(oversubscribed=True).until(lambda polls: self._poll(), self._look)
        if self.error is not None:
            raise self.error
        return True

    def _poll(self) -> bool:
        """Let MPI make progress; return whether the message has ended."""
        with self._lock:
            if self.done:
                return True
            status = MPI.Status()
            try:
                while self._requests:
                    if not self._requests[0].Test(status):
                        return False
                    self._requests.pop(0)
            except MPI.Exception as error:
                return self._end(f"MPI reports {error}; the sizes of both tensors must be equal")
            if self._nbytes is not None:
                self._source = status.Get_source()
                received = status.Get_count(MPI.BYTE)
                if received != self._nbytes:
                    return self._end(f"the message has {received} bytes, but the tensor {self._nbytes}")
                copy_back(self.outputs[0], self._flat)
            activity.mark_progress()
            return self._end("")

    def _end(self, problem: str) -> bool:
        self.end(CollectiveFailed(f"{self._text}: {problem}") if problem else None)
        return True

    def _look(self) -> None:
        now = perf_counter()
        if now > self._deadline:
            self._fail("exceeded the timeout")
        elif now > self._looked + 0.25:
            if self._looked and self._has_ended() and not self._poll():
                self._fail("the other rank has ended")
            self._looked = now

    def _fail(self, problem: str) -> None:
        with self._lock:
            if not self.done:
                self._end(problem)

    def _end_later(self) -> None:
        threading.Thread(target=self._wait_quietly, daemon=True).start()

    def _wait_quietly(self) -> None:
        with suppress(CollectiveFailed):  # after such an error, the future has ended the process
            self.wait()

    def is_completed(self) -> bool:
        """Return whether the message has been sent or received."""
        return self._poll()

    def source_rank(self) -> int:
        """Return the rank that sent a received message."""
        return self._source

    _source_rank = source_rank
