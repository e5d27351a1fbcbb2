"""The operations that this rank's program has submitted to a process set, until they end."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from .request import Handle, title
from .timeline import Timeline

_LARGEST_NUMBER = 1 << 30


class Submissions:
    """Open operations, and those of them that are not announced to the other ranks yet. Any thread may submit.

    Attributes:
        queue: The operations to announce, in the order of their submission.
        number: The number of the last operation without a name.
        error: Why no operation is possible any more; None while operations are possible.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.queue: deque[Handle] = deque()
        self.number = 0
        self.error: Exception | None = None
        self._timeline, self._lock = timeline, threading.Lock()
        self._open: dict[tuple[str, str, int], Handle] = {}

    def __bool__(self) -> bool:
        """Return whether operations have been submitted that are not complete."""
        return bool(self._open)

    def add(self, handle: Handle) -> Handle:
        """Add an operation.

        Raises:
            ValueError: An operation with the same name is open.
            HorovodInternalError: A rank has shut down or ended, or an earlier operation has failed.
        """
        request = handle.request
        with self._lock:
            if self.error is not None:
                raise self.error
            if not request.name:
                self.number = self.number % _LARGEST_NUMBER + 1
                handle.key = (request.kind, "", self.number)
            if self._open.setdefault(handle.key, handle) is not handle:
                raise ValueError(
                    f"{title(*handle.key)} has been submitted before, and is not complete; "
                    f"use another name, or call synchronize() first"
                )
            self.queue.append(handle)
        return handle

    def find(self, key: tuple[str, str, int]) -> Handle | None:
        """Return the open operation with this key; None if this rank has joined and did not submit it."""
        return self._open.get(key)

    def waiting(self) -> list[Handle]:
        """Return the open operations without join, which may wait for a long time."""
        return [handle for handle in list(self._open.values()) if handle.request.kind != "join"]

    def end(self, handle: Handle | None, result: Any, error: Exception | None = None) -> None:
        """End an operation; do nothing for None."""
        if handle is not None:
            if error is None:
                self._timeline.ended(handle)
            del self._open[handle.key]  # before the program sees the end and may use the name again
            handle.end(result, error)

    def end_all(self, error: Exception) -> None:
        """End all operations with an error, and refuse later ones."""
        with self._lock:
            self.error = error
            self.queue.clear()
            handles = [*self._open.values()]
        for handle in handles:
            self.end(handle, None, error)
