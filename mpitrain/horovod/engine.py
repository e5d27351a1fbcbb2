"""The engine of a rank: its process sets, and the threads that perform their operations.

A thread that waits for an operation performs the cycles itself. Handing cycles to another thread takes twice as long,
and on a node without spare cores that thread delays the computation. A background thread performs the cycles that no
other thread of this rank waits for. Other ranks may wait for these cycles. If cores are spare or ranks are on several
nodes, cycles also overlap with the computation.
"""

from __future__ import annotations

import threading
from time import perf_counter

import torch

from ..backend import process_end
from ..comm.backoff import Backoff
from ..core import activity
from .channel import Channel
from .request import Handle

_IDLE_S = 20e-3  # interval at which the background thread looks for requests
_BUSY_S = 5e-3  # the interval while operations are pending, and for some time after the last one
_RECENT_S = 1.0
_ACTIVE_S = 500e-6  # the interval within a cycle
_LEAVE_S = 10.0  # maximum time for the other ranks to shut down, too


class Engine:
    """Performs the operations of all process sets of this rank. Every method is local.

    Args:
        channel: The channel of the set of all ranks.
        cycle_s: Seconds between two cycles that no thread waits for.

    Attributes:
        channels: The channels of this rank's process sets, by the number of the set.
    """

    def __init__(self, channel: Channel, cycle_s: float) -> None:
        self.channels, self._cycle_s = {0: channel}, cycle_s
        hierarchy = channel.members.hierarchy
        self._overlaps = hierarchy.cores > hierarchy.node.size or hierarchy.n_nodes > 1
        self._backoff = Backoff(oversubscribed=hierarchy.node.size > hierarchy.cores)
        self._performing = threading.Lock()  # held by the thread that performs a part of a cycle
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpitrain.horovod", daemon=True)
        self._thread.start()

    def wait(self, handle: Handle) -> None:
        """Return when an operation has ended. The other ranks of the process set must submit the operation, too."""
        if not self.poll(handle, 100):
            with activity.waiting():
                self._backoff.until(lambda polls: self.poll(handle, polls), self._look)

    def poll(self, handle: Handle, polls: int = 1) -> bool:
        """Continue the cycles as far as possible; return whether this operation has ended."""
        if not handle.done and self._performing.acquire(blocking=False):
            try:
                self._advance(polls)
            finally:
                self._performing.release()
        return handle.done

    def release(self, number: int) -> Channel | None:
        """Leave a process set, and return its channel; None if this rank does not belong to it."""
        with self._performing:
            channel = self.channels.pop(number, None)
            if channel is not None:
                channel.leave()
        return channel

    def close(self) -> bool:
        """Leave all process sets; return whether all are freed. Waits at most ten seconds for other ranks to leave."""
        self._closing.set()
        self._thread.join()
        channels = [self.release(number) for number in [*self.channels]]
        until = perf_counter() + (0.0 if process_end.is_raising() else _LEAVE_S)
        has_freed = [channel.free(until) for channel in reversed(channels) if channel is not None]
        return all(has_freed)

    def _advance(self, polls: int) -> None:
        for channel in [*self.channels.values()]:
            channel.advance(polls if len(self.channels) == 1 else 1)

    def _look(self) -> None:
        if self._performing.acquire(blocking=False):
            try:
                for channel in [*self.channels.values()]:
                    channel.look()
            finally:
                self._performing.release()

    # The background thread.

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while not self._closing.wait(self._pause()):
            self._look()
            if any(self._should_perform(channel) for channel in self.channels.values()):
                self._perform()

    def _pause(self) -> float:
        channels = self.channels.values()
        if any(channel.active for channel in channels):
            return _ACTIVE_S
        recently = perf_counter() - _RECENT_S
        if any(channel.submissions or channel.completed > recently for channel in channels):
            return min(self._cycle_s, _BUSY_S) if self._overlaps else _BUSY_S
        return _IDLE_S

    def _should_perform(self, channel: Channel) -> bool:
        return channel.is_awaited or (self._overlaps and bool(channel.submissions.queue))

    def _perform(self) -> None:
        """Begin and continue cycles; complete those that all ranks have begun."""
        with self._performing:
            self._advance(1)
        if self._any_committed():
            self._backoff.until(self._continue, self._look)

    def _continue(self, polls: int) -> bool:
        with self._performing:
            self._advance(polls)
        return not self._any_committed()

    def _any_committed(self) -> bool:
        return any(channel.committed for channel in self.channels.values())
