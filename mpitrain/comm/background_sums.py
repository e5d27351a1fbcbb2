"""Sums over nodes that make progress while this rank computes.

MPI moves the data of a nonblocking operation only inside of MPI calls, and during a large matrix product the buffers of
a connection run empty. A thread therefore lets MPI progress every millisecond between ``start`` and the end of the
step. Each time, the thread needs a core for some microseconds; the compiled code that it interrupts does not hold the
GIL. A mutex ensures that the main thread and this thread do not use the sums at the same time.
"""

from __future__ import annotations

import threading
import time

from ..core.extra_state import ExtraState
from .hierarchy import Hierarchy
from .internode import NodeSums
from .mpi import MPI

_INTERVAL_S = 1e-3
_LEAST_NBYTES = 16 << 20  # for smaller vectors a thread is not worthwhile


def in_background(sums: NodeSums, hierarchy: Hierarchy, nbytes: int) -> NodeSums:
    """Return sums that progress in the background, or ``sums`` if this is impossible or not useful for ``nbytes``."""
    can_call_mpi = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    has_progress = type(sums).progress is not NodeSums.progress
    if nbytes < _LEAST_NBYTES or not has_progress or not can_call_mpi or hierarchy.node.size > hierarchy.cores:
        return sums
    return _BackgroundSums(sums)


class _BackgroundSums(NodeSums):
    """Sums with a thread that lets MPI progress; see ``NodeSums`` for the methods."""

    def __init__(self, sums: NodeSums) -> None:
        self._sums, self._lock, self._active = sums, threading.Lock(), threading.Event()
        self.parts, self.owned, self.is_replicated = sums.parts, sums.owned, sums.is_replicated
        self.bytes_sent = sums.bytes_sent
        self._ended = False
        self._error: Exception | None = None  # error of the thread, which the main thread will raise
        self._thread = threading.Thread(target=self._run, name="mpitrain-progress", daemon=True)
        self._thread.start()

    def start(self, index: int) -> None:
        with self._lock:
            self._raise()
            self._sums.start(index)
        self._active.set()

    def progress(self) -> None:
        if self._error is None and self._lock.acquire(blocking=False):
            try:
                self._sums.progress()
            finally:
                self._lock.release()

    def finish(self, index: int) -> None:
        with self._lock:
            self._raise()
            self._sums.finish(index)
            self._raise()

    def share(self, index: int) -> None:
        with self._lock:
            self._sums.share(index)

    def complete(self, index: int) -> None:
        with self._lock:
            self._sums.complete(index)

    def end_step(self) -> None:
        self._active.clear()
        with self._lock:
            self._sums.end_step()

    def extra_state(self) -> ExtraState:
        return self._sums.extra_state()

    def load_extra_state(self, state: ExtraState) -> None:
        self._sums.load_extra_state(state)

    def free(self) -> None:
        self._ended = True
        self._active.set()
        self._thread.join()
        self._sums.free()

    def _run(self) -> None:
        while not self._ended:
            self._active.wait()
            try:
                self.progress()
            except Exception as error:
                self._error = error
                self._active.clear()
            time.sleep(_INTERVAL_S)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
