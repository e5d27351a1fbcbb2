"""The operations of one process set: cycles of negotiation and execution.

A cycle is a generator, like its collectives. It yields the condition for which it waits, and any thread may resume it.
A rank starts a cycle when it has something to announce, or when other ranks wait; the cycle continues when all ranks
have started it. A rank that has nothing pending need not take part, because no operation is ready before all ranks have
submitted it.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ..backend.collectives import Collectives
from ..backend.internode import Condition, Steps
from ..backend.members import members_of
from ..comm.mpi import MPI
from ..core import activity
from ..core.layout import Array
from ..core.words import numbered
from ..errors import HorovodInternalError
from .execution import Execution, Operation, fused
from .negotiation import Negotiation, Ready
from .notices import Notices
from .request import Handle, Request, title
from .settings import Settings
from .timeline import Timeline

_WORDS = 1024  # words of a rank's announcement: the number of pairs, bytes of new requests, and the pairs
_HEADER = 2
_LARGEST_NUMBER = 1 << 30
_LOOK_S = 0.25  # interval of the checks for ranks that have ended
_ANSWER_S = 2.0  # time for the other ranks to report what they have submitted
_PAUSE_S = 5e-3  # pause after a cycle in which no rank has announced anything


class Channel:
    """The operations of a process set. Construction is collective over ``comm``; other methods are local.

    Args:
        comm: Communicator of the set's ranks; the channel owns it.
        name: Name of the process set in messages.
        ranks: The set's ranks in the world.

    Attributes:
        members: The set's ranks as communicators.
        committed: Whether all ranks have begun the cycle that this rank performs.
        completed: When the last cycle ended, on the clock of ``perf_counter``.
        error: Why no operation is possible any more; None while operations are possible.
    """

    def __init__(
        self, comm: MPI.Intracomm, name: str, ranks: Sequence[int], settings: Settings, timeline: Timeline
    ) -> None:
        self.members = members_of(comm, name)
        self.rank, self.size, self.ranks = comm.rank, comm.size, ranks
        self._staging, self._collectives = self.members.staging, Collectives(self.members)
        self._settings, self._timeline = settings, timeline
        self._negotiation = Negotiation(ranks)
        self._execution = Execution(
            self._collectives, self.rank, self.size, settings.fusion_bytes, timeline.began, self._end
        )
        self._lock = threading.Lock()  # protects the state that submitting threads change
        self._queue: deque[Handle] = deque()
        self._open: dict[tuple[str, str, int], Handle] = {}
        self._number = 0
        # On one node, ranks write announcements to double-buffered shared memory: cycles use two tables in turn. On
        # several nodes they are exchanged by an allgather.
        self._shared_rows = self.members.hierarchy.shared.allocate((2, self.size, _WORDS), np.int32)
        self._own = torch.zeros(_WORDS, dtype=torch.int32, device="cpu")
        self._rows = torch.zeros((self.size, _WORDS), dtype=torch.int32, device="cpu")
        self._steps: Steps | None = None
        # Operations that are kept after an error, because MPI may still write to their buffers.
        self._abandoned: Steps | None = None
        self._condition: Condition = 0
        self._cycles = 0
        self._agreed = False  # whether all ranks announced the same operations in the last cycle
        self._not_before = 0.0  # when the next cycle may begin if there is nothing to announce
        self._notices = Notices(self.members.messages)
        self._looked = 0.0
        self._asked, self._next_report = False, 0.0  # of operations that have waited long
        self.committed = False
        self.completed = 0.0
        self.error: Exception | None = None

    # Submission by programs.

    def submit(self, handle: Handle) -> Handle:
        """Submit an operation.

        Raises:
            ValueError: An operation with the same name is pending.
            HorovodInternalError: A rank has shut down or ended, or an earlier operation has failed.
        """
        request = handle.request
        with self._lock:
            if self.error is not None:
                raise self.error
            if not request.name:
                self._number = self._number % _LARGEST_NUMBER + 1
                handle.key = (request.kind, "", self._number)
            if self._open.setdefault(handle.key, handle) is not handle:
                raise ValueError(
                    f"{title(*handle.key)} has been submitted before, and is not complete; "
                    f"use another name, or call synchronize() first"
                )
            self._queue.append(handle)
        return handle

    @property
    def pending(self) -> bool:
        """Whether operations have been submitted that are not complete."""
        return bool(self._open)

    @property
    def announces(self) -> bool:
        """Whether this rank has something to announce in the next cycle."""
        return bool(self._queue)

    @property
    def active(self) -> bool:
        """Whether this rank has begun a cycle and not finished it."""
        return self._steps is not None

    @property
    def is_awaited(self) -> bool:
        """Whether a cycle is active, or another rank waits for this rank to begin a cycle."""
        return self._steps is not None or self._notices.asked or (self.pending and self._staging.is_behind())

    # Called by the engine, on one thread at a time.

    def advance(self, polls: int = 1) -> None:
        """Begin a cycle if there is a reason, and continue it as far as other ranks allow.

        Args:
            polls: How many times to check whether the other ranks allow it.
        """
        try:
            if self._steps is None:
                if not self._should_begin():
                    return
                self._steps = self._cycle()
                self._condition = next(self._steps)
            while self._reached(polls):
                self.committed = True
                self._condition = next(self._steps)
        except StopIteration:
            self._steps, self.committed = None, False
            activity.mark_progress()
        except Exception as error:
            self._fail(f"an operation failed: {type(error).__name__}: {error}")

    def _should_begin(self) -> bool:
        if self.error is not None:
            return False
        if self._queue or self._notices.asked:
            return True
        if not self._open:
            return False
        # This rank does not know whether ranks on other nodes wait.
        return self._staging.is_behind() or (not self.members.on_one_node and perf_counter() > self._not_before)

    def _reached(self, polls: int) -> bool:
        if isinstance(self._condition, int):
            return self._staging.barrier.poll(self._condition, polls)
        return bool(self._condition.Test())

    def _cycle(self) -> Steps:
        """Announce new requests, and perform operations that are ready. Collective over the set.

        If the ranks agreed in the last cycle, they probably agree in this cycle. The first block of the announced
        tensors is then published together with the announcement.
        """
        self._notices.asked = False
        handles, words, new = self._announcement()
        is_usual = self._agreed and not any(handle.request.kind == "join" for handle in handles)
        groups = fused([(handle.request, handle) for handle in handles]) if is_usual else []
        is_staged = not new and self._execution.stage(groups)
        if not is_staged:
            self._collectives.skip()
        rows = yield from self._exchange_rows(words)
        self._timeline.cycle()
        self._agreed = not self._negotiation.is_pending and _all_equal(rows)
        if self._agreed and is_staged:
            yield from self._execution.perform(groups, True)
        else:
            texts = (yield from self._exchange(rows, new)) if rows[:, 1].any() else [[]] * self.size
            announced = [row[_HEADER : _HEADER + 2 * row[0]].reshape(-1, 2).tolist() for row in rows]
            ready = self._negotiation.receive(announced, texts)
            yield from self._execution.perform(fused(self._take(ready)), False)
        if not words[0]:
            self._not_before = perf_counter() + _PAUSE_S
        self._cycles += 1
        self.completed = perf_counter()

    def _announcement(self) -> tuple[list[Handle], list[int], bytes]:
        """Return the announcement of this rank, as handles and as words, and the requests that have no number yet."""
        handles, words, new = list[Handle](), [0, 0], dict[Request, int]()
        while self._queue and len(words) + 2 <= _WORDS:
            handle = self._queue.popleft()
            handles.append(handle)
            at = self._negotiation.number_of(handle.request)
            if at is None:
                at = new.setdefault(handle.request, -1 - len(new))
            words += at, self._number if handle.request.kind == "join" else handle.key[-1]
        text = pickle.dumps([tuple(request) for request in new]) if new else b""
        words[:_HEADER] = len(handles), len(text)
        return handles, words, text

    def _exchange_rows(self, words: list[int]) -> Generator[Condition, None, Array]:
        """Return the announcements of all ranks, one per row. Collective over the set."""
        if self.members.on_one_node:
            rows: Array = self._shared_rows[self._cycles & 1]
            rows[self.rank, : len(words)] = words
            yield self._staging.publish()
            return rows
        self._own.numpy()[: len(words)] = words
        yield from self._collectives.all_gather(self._rows.unbind(), [self._own])
        return self._rows.numpy()

    def _exchange(self, rows: Array, text: bytes) -> Generator[Condition, None, list[list[Request]]]:
        """Return the new requests of all ranks. Collective over the set."""
        own = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
        lengths = rows[:, 1].tolist()
        (joined,) = yield from self._collectives.all_gather_rows([own])
        texts = [part.numpy().tobytes() for part in joined.split(lengths)]
        return [[Request(*fields) for fields in pickle.loads(one)] if one else [] for one in texts]

    def _take(self, ready: Sequence[Ready]) -> Sequence[Operation]:
        """Return the operations to perform; end operations that fail, and ``join`` if all ranks have joined."""
        operations: list[Operation] = []
        for entry in ready:
            handle = self._open.get(entry.key)
            if entry.request.kind == "join":
                self._number = max(self._number, self._negotiation.next_number)
                self._end(handle, entry.value)
            elif entry.error:
                self._end(handle, None, HorovodInternalError(entry.error))
            else:
                operations.append((entry.request, handle))
        return operations

    def _end(self, handle: Handle | None, result: Any, error: Exception | None = None) -> None:
        if handle is not None:
            if error is None:
                self._timeline.ended(handle)
            del self._open[handle.key]  # before the program sees the end and may use the name again
            handle.end(result, error)

    def _fail(self, reason: str) -> None:
        """End all operations, refuse later ones, and notify the other ranks."""
        with self._lock:
            self.error = HorovodInternalError(reason)
            self._steps, self._abandoned, self.committed = None, self._steps, False
            self._queue.clear()
            handles = [*self._open.values()]
        self._notices.leave(self._cycles)
        for handle in handles:
            self._end(handle, None, self.error)

    # Ranks that are late or have ended.

    def look(self) -> None:
        """Check for ranks that have shut down, and for operations that some ranks have not submitted."""
        now = perf_counter()
        if now < self._looked + _LOOK_S or self.error is not None:
            return
        self._looked = now
        self._notices.receive()
        gone = {rank for rank, cycles in self._notices.left.items() if cycles <= self._cycles}
        if self._steps is not None:
            gone |= {rank for rank in self.members.behind() if self.members.has_ended(rank)}
        if gone:
            self._fail(f"{self._text(gone)} shut down or ended, so that no operation of all ranks is possible")
        elif self._open:
            self._check_stalled(now)

    def _check_stalled(self, now: float) -> None:
        """Report operations that have waited long, after asking what the other ranks have submitted."""
        stall_s, shutdown_s = self._settings.stall_s, self._settings.shutdown_s
        age = now - min((handle.submitted for handle in self._waiting()), default=now)
        if shutdown_s is not None and age > shutdown_s:
            self._fail(f"not submitted by all ranks in time: {'; '.join(self._late(now, for_all=True))}")
        elif stall_s is None or age <= stall_s or now < self._next_report:
            return
        elif not self._asked:
            self._notices.ask()
            self._asked, self._next_report = True, now + _ANSWER_S
        else:
            for line in self._late(now, for_all=False):
                print(f"mpitrain: {line}", file=sys.stderr, flush=True)
            self._asked, self._next_report = False, now + stall_s

    def _late(self, now: float, for_all: bool) -> list[str]:
        """Describe the operations that wait for other ranks.

        Args:
            for_all: Whether to include operations that another rank reports: the lowest rank that has submitted them.
        """
        absent, lines = self._negotiation.absent(), []
        for handle in self._waiting():
            waits = f"{title(*handle.key)} has waited {now - handle.submitted:.0f} s for"
            ranks = absent.get(handle.key)
            if ranks is None:  # the cycle that announces the request is not complete
                behind = self.members.behind()
                who = self._text(behind) if behind else "a rank of another node"
                lines.append(f"{waits} {who}, which does not answer")
            elif for_all or self.rank == min(set(range(self.size)) - set(ranks)):
                lines.append(
                    f"{waits} {self._text(ranks)}, which {'has' if len(ranks) == 1 else 'have'} not submitted it"
                )
        return lines

    def _waiting(self) -> list[Handle]:
        """Return the operations that wait for other ranks, without join, which may wait for a long time."""
        return [handle for handle in list(self._open.values()) if handle.request.kind != "join"]

    def _text(self, ranks: Iterable[int]) -> str:
        return numbered("rank", (self.ranks[rank] for rank in sorted(ranks)))

    # The end.

    def leave(self) -> None:
        """Take part in no further cycle; end pending operations."""
        if self.error is None:
            self._fail("shut down")

    def free(self, until: float) -> bool:
        """Free memory and communicators if all ranks leave in time, and return whether they are freed.

        If an operation that has failed may still use them, they are not freed before the process ends.

        Args:
            until: The latest time to wait, on the clock of ``perf_counter``.
        """
        if self._notices.agree_to_free(self._abandoned is None, until):
            self.members.free()
            return True
        self._staging.mark_ended()
        return False


def _all_equal(rows: Array) -> bool:
    """Return whether all ranks have announced the same requests, none of which is new."""
    n = _HEADER + 2 * rows[0, 0]
    first = rows[0, :n].tobytes()
    return not rows[0, 1] and all(row[:n].tobytes() == first for row in rows[1:])
