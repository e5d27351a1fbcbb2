"""Waiting for the other ranks of a process group: timeouts, ranks that have ended, and ranks that disagree."""

from __future__ import annotations

import os
import time
from time import perf_counter
from typing import Any

import numpy as np

from ..comm.backoff import Backoff
from ..comm.mpi import MPI
from ..core import activity
from ..core.words import numbered
from ..errors import CollectiveFailed
from .internode import Condition, Steps
from .members import Members
from .operations import Operation

_POLLS = 2000  # about 20 us before this rank yields its core
_JOIN_S = 200e-6  # an operation that all ranks join within this time is performed by the calling thread
_MESSAGE_S = 1e-3  # time that a rank waiting for a message yields its core before it sleeps; a block takes less time
_LOOK_S = 0.25  # interval of the checks for ranks that have ended
_EXPLAIN_S = 2.0  # maximum time for the headers of other nodes to arrive
_LATE_S = 1.0  # time, after a timeout, for other nodes to report which ranks have arrived
_HEADER_BYTES = 256


class Waiting:
    """The waits of a group's operations. Every method is local, but returns when other ranks have acted.

    Attributes:
        count: The number of operations that have started.
    """

    def __init__(self, members: Members, store: Any) -> None:
        self._members, self._staging, self._store = members, members.staging, store
        is_oversubscribed = members.staging.size > members.hierarchy.cores
        self._polls = 1 if is_oversubscribed else _POLLS
        self._backoff = Backoff(is_oversubscribed, yield_s=_MESSAGE_S)
        self._operation: Operation | None = None
        self.count = 0
        self._looked = 0.0
        self._header: MPI.Request | None = None
        self._headers = np.zeros((members.hierarchy.n_nodes, _HEADER_BYTES), np.uint8)

    def signed(self, operation: Operation, text: bytes, signature: int, steps: Steps) -> Steps:
        """Perform an operation, and check that all ranks have called the same operation.

        Within a node the ranks compare signatures when all have arrived. Between nodes their first ranks exchange
        headers while the operation's messages are under way.
        """
        staging, self._operation = self._staging, operation
        operation.number, self.count = self.count, self.count + 1
        staging.sign(operation.number, text, signature)
        if self._members.headers is not None:
            own = np.zeros(_HEADER_BYTES, np.uint8)
            shown = np.frombuffer(text, np.uint8, min(len(text), _HEADER_BYTES))
            own[: len(shown)] = shown
            self._header = self._members.headers.Iallgather(own, self._headers)
        yield next(steps)
        if staging.size > 1 and staging.disagrees(operation.number):
            texts = zip(self._members.ranks_of_node(self._members.node), staging.texts(operation.number), strict=True)
            raise self._different(dict(texts), "rank")
        yield from steps
        while self._header is not None:
            yield self._header
            self._check_headers()

    def poll(self, condition: Condition) -> bool:
        """Return whether a condition is met, now or within 0.2 ms."""
        if not isinstance(condition, int):
            return bool(condition.Test())
        barrier = self._staging.barrier
        if barrier.poll(condition, self._polls):
            return True
        until = perf_counter() + _JOIN_S
        while perf_counter() < until:
            os.sched_yield()
            if barrier.poll(condition, 1):
                return True
        return False

    def wait(self, operation: Operation, condition: Condition) -> None:
        """Return when a condition of an operation is met.

        Raises:
            CollectiveFailed: The operation timed out; a rank has ended; or nodes have called different operations.
        """
        self._operation, self._looked = operation, 0.0
        with activity.waiting():
            if isinstance(condition, int):
                self._staging.barrier.wait(condition, self._look)
                return
            try:
                self._backoff.until(lambda polls: condition.Test(), self._look)
            except MPI.Exception as error:
                self._explain_message_error()
                raise self._failed(f"MPI reports {error}") from error

    def _look(self) -> None:
        """Called from time to time while waiting."""
        now = perf_counter()
        operation = self._operation
        assert operation is not None
        self._check_headers()
        if now > operation.submitted + operation.timeout_s:
            raise self._timeout(operation)
        if now < self._looked + _LOOK_S:
            return
        if self._looked:
            ended = [rank for rank in self._members.behind() if self._members.has_ended(rank)]
            if ended:
                raise self._failed(f"{numbered('rank', ended)} of this node ended before the operation")
        self._looked = now

    def _timeout(self, operation: Operation) -> CollectiveFailed:
        members, seconds = self._members, operation.timeout_s
        arrived = {members.rank, *members.ranks_of_node(members.node)} - {*members.behind()}
        if not members.on_one_node:
            arrived |= self._arrived_elsewhere(operation)
        absent = [rank for rank in range(members.size) if rank not in arrived]
        return self._failed(
            f"exceeded the timeout of {seconds:g} s; {numbered('rank', absent)} did not join it"
            if absent
            else f"exceeded the timeout of {seconds:g} s"
        )

    def _arrived_elsewhere(self, operation: Operation) -> set[int]:
        """Return the ranks that joined this operation and have timed out in it, as the store records."""
        keys = [f"late/{operation.number}/{rank}" for rank in range(self._members.size)]
        self._store.set(keys[self._members.rank], "")
        time.sleep(_LATE_S)
        return {rank for rank, key in enumerate(keys) if self._store.check([key])}

    def _check_headers(self) -> None:
        """Compare the nodes' operations, if all headers have arrived."""
        if self._header is None or not self._header.Test():
            return
        self._header = None
        if (self._headers == self._headers[0]).all():
            return
        texts = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in self._headers]
        raise self._different(dict(enumerate(texts)), "node")

    def _explain_message_error(self) -> None:
        """Raise the cause of an MPI error, such as a message of the wrong size, if the headers show it."""
        until = perf_counter() + _EXPLAIN_S
        while self._header is not None and perf_counter() < until:
            self._check_headers()

    def _different(self, texts: dict[int, str], where: str) -> CollectiveFailed:
        by_text: dict[str, list[int]] = {}
        for place, text in sorted(texts.items()):
            by_text.setdefault(text, []).append(place)
        if len(by_text) == 1:  # the texts differ only in the part that is cut off
            return self._failed(f"another {where} has called a different operation")
        called = "; ".join(f"{numbered(where, places)}: {text}" for text, places in by_text.items())
        return self._failed(f"the {where}s have called different operations: {called}")

    def _failed(self, reason: str) -> CollectiveFailed:
        operation = self._operation
        assert operation is not None
        return CollectiveFailed(
            f"rank {self._members.rank} of process group {self._members.name!r}, operation {operation.number}, "
            f"{operation.text}: {reason}"
        )
