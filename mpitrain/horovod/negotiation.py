"""Find the operations that all ranks have submitted. Every rank computes the same answer from the same messages.

In a cycle all ranks exchange their new requests. Each rank keeps the table of all submitted requests of all ranks. A
request is ready when the last rank has submitted it. All tables are equal after each cycle, and so are the ready
requests and their order; no rank has a special role.

Requests that have occurred before are sent as numbers. All ranks number new requests in the same order: by cycle, and
within a cycle by rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..core.words import numbered
from .request import ReduceOp, Request, title

_LARGEST_TABLE = 20_000  # number of requests above which the table is cleared, when nothing is pending
_WITH_JOINED = ("allreduce", "barrier", "join")
Name = tuple[str, int]


@dataclass(frozen=True)
class Ready:
    """An operation that all ranks have submitted.

    Attributes:
        request: The request of the first rank.
        number: The number of the operation, if it has no name.
        error: Why it fails on all ranks; empty if it does not.
        value: The result of operations without tensors.
    """

    request: Request
    number: int
    error: str = ""
    value: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        """The key by which ranks match the operation."""
        return self.request.kind, self.request.name, self.number


@dataclass
class Negotiation:
    """The requests of all ranks of a process set. Local, but equal on all ranks.

    Attributes:
        ranks: The ranks of the process set, in MPI's world; the set numbers them from 0.
        joined: Ranks that have joined, numbered by the set.
        next_number: The next number of operations without a name after all ranks have joined; ranks may have submitted
            different numbers of them.
    """

    ranks: Sequence[int]
    joined: set[int] = field(default_factory=set)
    next_number: int = 0
    _requests: list[Request] = field(default_factory=list)
    _numbers: dict[Request, int] = field(default_factory=dict)
    _pending: dict[Name, dict[str, dict[int, Request]]] = field(default_factory=dict)

    @property
    def is_pending(self) -> bool:
        """Whether a rank has joined, or has submitted a request that others have not."""
        return bool(self._pending or self.joined)

    def number_of(self, request: Request) -> int | None:
        """Return the number of a request; None if it is new."""
        return self._numbers.get(request)

    def receive(self, announced: Sequence[Sequence[Sequence[int]]], new: Sequence[Sequence[Request]]) -> list[Ready]:
        """Take the requests that the ranks have submitted; return the operations that are ready, in their order.

        Args:
            announced: For each rank, its requests as pairs: the request's number, or -1 - the index of a new request;
                and the operation's own number.
            new: For each rank, requests that have no number yet.
        """
        for request in (request for row in new for request in row):
            if request not in self._numbers:
                self._numbers[request] = len(self._requests)
                self._requests.append(request)
        ready: list[Ready] = []
        for rank, row in enumerate(announced):
            for at, number in row:
                request = self._requests[at] if at >= 0 else new[rank][-1 - at]
                ready += self._submit(rank, request, number)
        if len(self._requests) > _LARGEST_TABLE and not self._pending:
            self._requests.clear()
            self._numbers.clear()
        return ready

    def _submit(self, rank: int, request: Request, number: int) -> Iterator[Ready]:
        if request.kind == "join":
            self.next_number = max(self.next_number, number)
            yield from self._join(rank, request)
            return
        kinds = self._pending.setdefault((request.name, number), {})
        kinds.setdefault(request.kind, {})[rank] = request
        yield from self._check(request.name, number)

    def _join(self, rank: int, request: Request) -> Iterator[Ready]:
        self.joined.add(rank)
        for name, of_name in list(self._pending):
            yield from self._check(name, of_name)
        if len(self.joined) == len(self.ranks):
            self.joined.clear()
            yield Ready(request, 0, value=self.ranks[rank])

    def _check(self, name: str, number: int) -> Iterator[Ready]:
        """Yield the operations with this name that are ready."""
        kinds = self._pending[name, number]
        for kind, requests in list(kinds.items()):
            if len(requests.keys() | self.joined) == len(self.ranks):
                del kinds[kind]
                yield self._ready(requests, number)
        if len(kinds) > 1 and len(set().union(*kinds.values()) | self.joined) == len(self.ranks):
            text = self._differences(
                {rank: request for requests in kinds.values() for rank, request in requests.items()}
            )
            for kind, requests in kinds.items():
                first = next(iter(requests.values()))
                yield Ready(first, number, f"{title(kind, name, number)}: {text}")
            kinds.clear()
        if not kinds:
            del self._pending[name, number]

    def _ready(self, requests: dict[int, Request], number: int) -> Ready:
        first = requests[min(requests)]
        what = title(first.kind, first.name, number)
        error = ""
        if any(request != first for request in requests.values()):
            error = f"{what}: {self._differences(requests)}"
        elif self.joined - requests.keys():
            joined = self._text(self.joined)
            if first.kind not in _WITH_JOINED:
                error = f"{what}: {joined} called join(), after which only allreduce and barrier are possible"
            elif first.op not in (ReduceOp.Sum, ReduceOp.Average, None):
                error = f"{what}: {joined} called join(), after which allreduce supports only Sum and Average"
        return Ready(first, number, error)

    def absent(self) -> dict[tuple[str, str, int], list[int]]:
        """Return the keys of the pending operations, each with the ranks that have not submitted it."""
        return {
            (kind, name, number): sorted(set(range(len(self.ranks))) - requests.keys() - self.joined)
            for (name, number), kinds in self._pending.items()
            for kind, requests in kinds.items()
        }

    def _differences(self, requests: dict[int, Request]) -> str:
        by_text: dict[str, list[int]] = {}
        for rank, request in sorted(requests.items()):
            by_text.setdefault(request.text, []).append(rank)
        submitted = "; ".join(f"{self._text(ranks)}: {text}" for text, ranks in by_text.items())
        return f"the ranks have submitted different operations: {submitted}"

    def _text(self, ranks: Iterable[int]) -> str:
        return numbered("rank", (self.ranks[rank] for rank in sorted(ranks)))
