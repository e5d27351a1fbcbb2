"""The operations of one process set: cycles of negotiation and execution.

A cycle is a generator, like its collectives. It yields the condition for which it waits, and any thread may resume it.
A rank starts a cycle when it has something to announce, or when other ranks wait; the cycle continues when all ranks
have started it. A rank that has nothing pending need not take part, because no operation is ready before all ranks have
submitted it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from time import perf_counter

from ..backend.collectives import Collectives
from ..backend.internode import Condition, Steps
from ..backend.members import members_of
from ..comm.mpi import MPI
from ..core import activity
from ..core.words import numbered
from ..errors import HorovodInternalError
from .announcements import MOST_PAIRS, Announcements, are_equal, pairs_of, text_of
from .execution import Execution, Operation, fused
from .negotiation import Negotiation, Ready
from .notices import Notices
from .request import Handle, Request, title
from .settings import Settings
from .submissions import Submissions
from .timeline import Timeline

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
        submissions: The operations that the program has submitted.
        committed: Whether all ranks have begun the cycle that this rank performs.
        completed: When the last cycle ended, on the clock of ``perf_counter``.
    """

    def __init__(
        self, comm: MPI.Intracomm, name: str, ranks: Sequence[int], settings: Settings, timeline: Timeline
    ) -> None:
        self.members = members_of(comm, name)
        self.submissions = Submissions(timeline)
        self._ranks, self._settings, self._timeline = ranks, settings, timeline
        self._collectives = Collectives(self.members)
        self._announcements = Announcements(self.members, self._collectives)
        self._negotiation = Negotiation(ranks)
        self._execution = Execution(
            self._collectives, comm.rank, comm.size, settings.fusion_bytes, timeline.began, self.submissions.end
        )
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

    @property
    def active(self) -> bool:
        """Whether this rank has begun a cycle and not finished it."""
        return self._steps is not None

    @property
    def is_awaited(self) -> bool:
        """Whether a cycle is active, or another rank waits for this rank to begin a cycle."""
        if self._steps is not None or self._notices.asked:
            return True
        return bool(self.submissions) and self.members.staging.is_behind()

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
        if self.submissions.error is not None:
            return False
        if self.submissions.queue or self._notices.asked:
            return True
        if not self.submissions:
            return False
        # This rank does not know whether ranks on other nodes wait.
        return self.members.staging.is_behind() or (not self.members.on_one_node and perf_counter() > self._not_before)

    def _reached(self, polls: int) -> bool:
        if isinstance(self._condition, int):
            return self.members.staging.barrier.poll(self._condition, polls)
        return bool(self._condition.Test())

    def _cycle(self) -> Steps:
        """Announce new requests, and perform operations that are ready. Collective over the set.

        If the ranks agreed in the last cycle, they probably agree in this cycle. The first block of the announced
        tensors is then published together with the announcement.
        """
        self._notices.asked = False
        handles, pairs, new = self._announcement()
        is_usual = self._agreed and not any(handle.request.kind == "join" for handle in handles)
        groups = fused([(handle.request, handle) for handle in handles]) if is_usual else []
        is_staged = not new and self._execution.stage(groups)
        if not is_staged:
            self._collectives.skip()
        rows = yield from self._announcements.exchange(pairs, new)
        self._timeline.cycle()
        self._agreed = not self._negotiation.is_pending and are_equal(rows)
        if self._agreed and is_staged:
            yield from self._execution.perform(groups, True)
        else:
            requests = yield from self._announcements.exchange_new(rows, new)
            ready = self._negotiation.receive(pairs_of(rows), requests)
            yield from self._execution.perform(fused(self._take(ready)), False)
        if not handles:
            self._not_before = perf_counter() + _PAUSE_S
        self._cycles += 1
        self.completed = perf_counter()

    def _announcement(self) -> tuple[list[Handle], list[int], bytes]:
        """Return the announcement of this rank, as handles and as pairs, and the requests that have no number yet."""
        handles, pairs, new = list[Handle](), list[int](), dict[Request, int]()
        queue = self.submissions.queue
        while queue and len(handles) < MOST_PAIRS:
            handle = queue.popleft()
            handles.append(handle)
            at = self._negotiation.number_of(handle.request)
            if at is None:
                at = new.setdefault(handle.request, -1 - len(new))
            pairs += at, self.submissions.number if handle.request.kind == "join" else handle.key[-1]
        return handles, pairs, text_of([*new])

    def _take(self, ready: Sequence[Ready]) -> Sequence[Operation]:
        """Return the operations to perform; end operations that fail, and ``join`` if all ranks have joined."""
        operations, submissions = list[Operation](), self.submissions
        for entry in ready:
            handle = submissions.find(entry.key)
            if entry.request.kind == "join":
                submissions.number = max(submissions.number, self._negotiation.next_number)
                submissions.end(handle, entry.value)
            elif entry.error:
                submissions.end(handle, None, HorovodInternalError(entry.error))
            else:
                operations.append((entry.request, handle))
        return operations

    def _fail(self, reason: str) -> None:
        """End all operations, refuse later ones, and notify the other ranks."""
        self._steps, self._abandoned, self.committed = None, self._steps, False
        self._notices.leave(self._cycles)
        self.submissions.end_all(HorovodInternalError(reason))

    # Ranks that are late or have ended.

    def look(self) -> None:
        """Check for ranks that have shut down, and for operations that some ranks have not submitted."""
        now = perf_counter()
        if now < self._looked + _LOOK_S or self.submissions.error is not None:
            return
        self._looked = now
        self._notices.receive()
        gone = {rank for rank, cycles in self._notices.left.items() if cycles <= self._cycles}
        if self._steps is not None:
            gone |= {rank for rank in self.members.behind() if self.members.has_ended(rank)}
        if gone:
            self._fail(f"{self._text(gone)} shut down or ended, so that no operation of all ranks is possible")
        elif self.submissions:
            self._check_stalled(now)

    def _check_stalled(self, now: float) -> None:
        """Report operations that have waited long, after asking what the other ranks have submitted."""
        stall_s, shutdown_s = self._settings.stall_s, self._settings.shutdown_s
        age = now - min((handle.submitted for handle in self.submissions.waiting()), default=now)
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
        for handle in self.submissions.waiting():
            waits = f"{title(*handle.key)} has waited {now - handle.submitted:.0f} s for"
            ranks = absent.get(handle.key)
            if ranks is None:  # the cycle that announces the request is not complete
                behind = self.members.behind()
                who = self._text(behind) if behind else "a rank of another node"
                lines.append(f"{waits} {who}, which does not answer")
            elif for_all or self.members.rank == min(set(range(self.members.size)) - set(ranks)):
                lines.append(
                    f"{waits} {self._text(ranks)}, which {'has' if len(ranks) == 1 else 'have'} not submitted it"
                )
        return lines

    def _text(self, ranks: Iterable[int]) -> str:
        return numbered("rank", (self._ranks[rank] for rank in sorted(ranks)))

    # The end.

    def leave(self) -> None:
        """Take part in no further cycle; end pending operations."""
        if self.submissions.error is None:
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
        self.members.staging.mark_ended()
        return False
