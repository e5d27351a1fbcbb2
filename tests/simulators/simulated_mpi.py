"""MPI in one process: the ranks are threads, or generators that a test advances. No function of MPI is called."""

from __future__ import annotations

import functools
import operator
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI as REAL

from mpitrain.core.layout import Array

_TIMEOUT_S = 30.0  # a wait that takes longer is a deadlock
ANY_SOURCE, ANY_TAG = -2, -3


class MpiError(Exception):
    """An error that MPI reports."""


class Aborted(BaseException):
    """A rank has ended all ranks."""


class Deadlock(Exception):
    """No rank can continue."""


class World:
    """The ranks of a program.

    Args:
        node_of: The node of each rank.
    """

    def __init__(self, node_of: Sequence[int]) -> None:
        self.node_of, self.size = list(node_of), len(node_of)
        self.changed = threading.Condition(threading.RLock())
        self.failed = False
        self._boards: dict[object, _Board] = {}
        self._comms: dict[int, Comm] = {}
        self.current = threading.local()

    def board(self, key: object, size: int) -> _Board:
        """Return the board of a communicator, the same for all its ranks."""
        with self.changed:
            return self._boards.setdefault(key, _Board(size))

    def comm(self, rank: int) -> Comm:
        """Return the communicator of all ranks."""
        with self.changed:
            if rank not in self._comms:
                self._comms[rank] = Comm(self, "world", tuple(range(self.size)), rank)
            return self._comms[rank]

    @property
    def here(self) -> int:
        """The rank of this thread."""
        return getattr(self.current, "rank", 0)

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Return when the predicate is true; another rank makes it true."""

        def is_over() -> bool:
            return self.failed or predicate()

        with self.changed:
            if not self.changed.wait_for(is_over, _TIMEOUT_S):
                raise Deadlock
        if self.failed:
            raise Deadlock

    def run(self, program: Callable[[Comm], Any]) -> list[Any]:
        """Return the results of a program on all ranks, which are threads; raise the first exception of a rank."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def of_rank(rank: int) -> None:
            self.current.rank = rank
            try:
                results[rank] = program(self.comm(rank))
            except BaseException as error:
                errors.append(error)
                with self.changed:
                    self.failed = True
                    self.changed.notify_all()

        threads = [threading.Thread(target=of_rank, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * _TIMEOUT_S)
        if errors:
            raise next((error for error in errors if not isinstance(error, Deadlock)), errors[0])
        assert not any(thread.is_alive() for thread in threads)
        return results


class _Board:
    """What the ranks of a communicator have passed to its operations."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: dict[int, dict[int, tuple[str, Any]]] = {}
        self.sent: list[_Message] = []  # without a place
        self.received: list[_Message] = []  # places without a message
        self.freed: set[int] = set()


class _Message:
    """A message, or the place for one."""

    def __init__(self, source: int, to: int, tag: int, data: Array) -> None:
        self.source, self.to, self.tag, self.data = source, to, tag, data
        self.partner: _Message | None = None


class Request:
    """An operation that completes later."""

    def __init__(self, world: World, is_ready: Callable[[], bool], finish: Callable[[Any], None]) -> None:
        self._world, self._is_ready, self._finish, self.done = world, is_ready, finish, False

    def Test(self, status: Any = None) -> bool:  # noqa: N802
        with self._world.changed:
            if not self.done and self._is_ready():
                self.done = True
                self._finish(status)
            return self.done

    def Wait(self) -> None:  # noqa: N802
        self._world.wait_for(self.Test)

    @staticmethod
    def Waitall(requests: Sequence[Request]) -> None:  # noqa: N802
        for request in requests:
            request.Wait()

    @staticmethod
    def Testall(requests: Sequence[Request]) -> bool:  # noqa: N802
        return all(request.Test() for request in requests)


class Comm:
    """A communicator, as one of its ranks sees it.

    Args:
        key: Identifies the communicator.
        members: The ranks in the world, in order.
    """

    def __init__(self, world: World, key: object, members: tuple[int, ...], rank: int) -> None:
        self.world, self.members, self.rank, self.size = world, members, rank, len(members)
        self._key, self._board, self._calls = key, world.board(key, len(members)), 0
        self._groups = Counter[object]()

    def _post(self, kind: str, value: Any) -> Callable[[], list[Any] | None]:
        """Take part in a collective operation; return a function that returns all values when all ranks have joined."""
        world = self.world
        with world.changed:
            values = self._board.calls.setdefault(self._calls, {})
            self._calls += 1
            values[self.rank] = (kind, value)
            world.changed.notify_all()
        size = self.size

        def all_values() -> list[Any] | None:
            if len(values) < size:
                return None
            kinds = {name for name, _ in values.values()}
            assert len(kinds) == 1, f"the ranks have called different operations: {kinds}"
            return [values[rank][1] for rank in range(size)]

        return all_values

    def _collect(self, kind: str, value: Any) -> list[Any]:
        all_values = self._post(kind, value)
        self.world.wait_for(lambda: all_values() is not None)
        return all_values()  # type: ignore[return-value]

    def _later(self, kind: str, value: Any, finish: Callable[[list[Any]], None]) -> Request:
        all_values = self._post(kind, value)
        return Request(
            self.world,
            lambda: all_values() is not None,
            lambda _: finish(all_values()),  # type: ignore[arg-type]
        )

    # Blocking operations; the ranks are threads.

    def Barrier(self) -> None:  # noqa: N802
        self._collect("barrier", None)

    def allgather(self, value: Any) -> list[Any]:
        return self._collect("allgather", value)

    def bcast(self, value: Any = None, root: int = 0) -> Any:
        return self._collect("bcast", value)[root]

    def allreduce(self, value: Any, op: Callable[[Any, Any], Any] = operator.add) -> Any:
        return functools.reduce(op, self._collect("allreduce", value))

    def Send(self, message: Any, dest: int, tag: int = 0) -> None:  # noqa: N802
        self.Isend(message, dest, tag).Wait()

    def Recv(self, message: Any, source: int, tag: int = 0) -> None:  # noqa: N802
        self.Irecv(message, source, tag).Wait()

    # Communicators.

    def Dup(self) -> Comm:  # noqa: N802
        number = self._calls
        self._collect("dup", None)
        return Comm(self.world, (self._key, number), self.members, self.rank)

    def Split(self, color: int, key: int = 0) -> Comm | None:  # noqa: N802
        number = self._calls
        rows = self._collect("split", (color, key))
        chosen = sorted((key, rank) for rank, (own, key) in enumerate(rows) if own == color)
        ranks = [rank for _, rank in chosen]
        members = tuple(self.members[rank] for rank in ranks)
        if color == REAL.UNDEFINED:
            return None
        return Comm(self.world, (self._key, number, color), members, ranks.index(self.rank))

    def Split_type(self, split_type: int, key: int = 0) -> Comm:  # noqa: N802
        made = self.Split(self.world.node_of[self.members[self.rank]], key)
        assert made is not None
        return made

    def Get_group(self) -> SimpleNamespace:  # noqa: N802
        def included(ranks: list[int]) -> SimpleNamespace:
            return SimpleNamespace(ranks=ranks, Free=lambda: None)

        return SimpleNamespace(Incl=included, Free=lambda: None)

    def Create_group(self, group: Any, tag: int) -> Comm:  # noqa: N802
        members = tuple(self.members[rank] for rank in group.ranks)
        key = (self._key, "group", members, tag)
        self._groups[key] += 1
        return Comm(self.world, (*key, self._groups[key]), members, group.ranks.index(self.rank))

    def Free(self) -> None:  # noqa: N802
        assert self.rank not in self._board.freed
        self._board.freed.add(self.rank)

    def Abort(self, status: int) -> None:  # noqa: N802
        raise Aborted(status)

    # Operations that complete later.

    def Ibarrier(self) -> Request:  # noqa: N802
        return self._later("ibarrier", None, lambda values: None)

    def Ibcast(self, message: Any, root: int) -> Request:  # noqa: N802
        def finish(values: list[Any]) -> None:
            _place(values[root], _memory(message))

        return self._later("ibcast", _memory(message).copy(), finish)

    def Iallgather(self, sent: Any, received: Any) -> Request:  # noqa: N802
        def finish(values: list[Any]) -> None:
            _place(np.concatenate(values), _memory(received))

        return self._later("iallgather", _memory(sent).copy(), finish)

    def Ialltoallv(self, sent: Any, received: Any) -> Request:  # noqa: N802
        def finish(values: list[Any]) -> None:
            for part, value in zip(_parts(received), values, strict=True):
                _place(value[self.rank], part)

        return self._later("ialltoallv", [part.copy() for part in _parts(sent)], finish)

    def Iallgatherv(self, sent: Any, received: Any) -> Request:  # noqa: N802
        assert sent is REAL.IN_PLACE
        parts = _parts(received)

        def finish(values: list[Any]) -> None:
            for part, value in zip(parts, values, strict=True):
                _place(value, part)

        return self._later("iallgatherv", parts[self.rank].copy(), finish)

    def Isend(self, message: Any, dest: int, tag: int = 0) -> Request:  # noqa: N802
        sent = _Message(self.rank, dest, tag, _memory(message).copy())
        self._add(sent, self._board.sent)
        return Request(self.world, lambda: sent.partner is not None, lambda status: None)

    def Irecv(self, message: Any, source: int, tag: int = 0) -> Request:  # noqa: N802
        place = _Message(source, self.rank, tag, _memory(message))
        self._add(place, self._board.received)

        def finish(status: Any) -> None:
            assert place.partner is not None
            data = place.partner.data
            if len(data) > len(place.data):
                raise MpiError("truncated")
            if status is not None:
                status.source, status.tag, status.nbytes = place.partner.source, place.partner.tag, len(data)

        return Request(self.world, lambda: place.partner is not None, finish)

    def Iprobe(self, source: int, tag: int, status: Any) -> bool:  # noqa: N802
        with self.world.changed:
            for sent in self._board.sent:
                fits = source in (sent.source, ANY_SOURCE) and tag in (sent.tag, ANY_TAG)
                if fits and sent.to == self.rank:
                    status.source, status.tag, status.nbytes = sent.source, sent.tag, len(sent.data)
                    return True
            return False

    def _add(self, message: _Message, to: list[_Message]) -> None:
        """Add a message or the place for one, and match messages with places in their order."""
        with self.world.changed:
            to.append(message)
            board = self._board
            for place in list(board.received):
                fitting = (
                    sent
                    for sent in board.sent
                    if (sent.to, sent.tag) == (place.to, place.tag) and place.source in (sent.source, ANY_SOURCE)
                )
                if (sent := next(fitting, None)) is not None:
                    place.partner, sent.partner = sent, place
                    board.received.remove(place)
                    board.sent.remove(sent)
                    nbytes = min(len(sent.data), len(place.data))
                    place.data[:nbytes] = sent.data[:nbytes]  # a message may arrive before its place is tested
            self.world.changed.notify_all()


def _memory(message: Any) -> Array:
    """Return the bytes of a message's elements, which share its memory."""
    array = message[0] if isinstance(message, (list, tuple)) else message
    assert array.flags.c_contiguous
    flat: Array = array.reshape(-1).view(np.uint8)
    return flat


def _parts(message: Any) -> list[Array]:
    """Return the parts of a message that has counts and displacements."""
    array, (counts, starts), _ = message
    flat = array.reshape(-1)
    return [flat[start : start + count].view(np.uint8) for count, start in zip(counts, starts, strict=True)]


def _place(values: Array, out: Array) -> None:
    assert len(values) == len(out), "the ranks have passed messages of different sizes"
    out[:] = values


class _Window:
    """Memory that the ranks of a node share."""

    def __init__(self, memory: Array) -> None:
        self._memory = memory

    @classmethod
    def allocate_shared(cls, nbytes: int, unit: int, info: object, comm: Comm) -> _Window:
        memory = comm.bcast(np.full(nbytes, 0xAB, np.uint8) if comm.rank == 0 else None)  # its contents are undefined
        return cls(memory)

    def Lock_all(self, flag: int) -> None: ...  # noqa: N802
    def Unlock_all(self) -> None: ...  # noqa: N802
    def Free(self) -> None: ...  # noqa: N802

    def Shared_query(self, rank: int) -> tuple[Array, int]:  # noqa: N802
        return self._memory, 1


class _Status:
    source, tag, nbytes = -1, -1, 0

    def Get_source(self) -> int:  # noqa: N802
        return self.source

    def Get_tag(self) -> int:  # noqa: N802
        return self.tag

    def Get_count(self, datatype: object) -> int:  # noqa: N802
        return self.nbytes


class SimulatedMpi:
    """Has the names of ``mpi4py.MPI`` that the package uses."""

    Exception, Status, Request = MpiError, _Status, Request
    Win = SimpleNamespace(Allocate_shared=_Window.allocate_shared)
    Datatype = SimpleNamespace(fromcode=lambda code: code)
    MIN, MAX, SUM = staticmethod(min), staticmethod(max), staticmethod(operator.add)
    LOR, LAND = staticmethod(operator.or_), staticmethod(operator.and_)
    BYTE, REQUEST_NULL, INFO_NULL, MODE_NOCHECK, COMM_TYPE_SHARED, THREAD_MULTIPLE = "byte", None, None, 0, 1, 3
    IN_PLACE, UNDEFINED, ANY_SOURCE, ANY_TAG = REAL.IN_PLACE, REAL.UNDEFINED, ANY_SOURCE, ANY_TAG

    def __init__(self, world: World) -> None:
        self.world = world
        self._alone = [Comm(world, ("self", rank), (rank,), 0) for rank in range(world.size)]

    @staticmethod
    def Intracomm(comm: Comm) -> Comm:  # noqa: N802
        return comm

    @property
    def COMM_WORLD(self) -> Comm:  # noqa: N802
        return self.world.comm(self.world.here)

    @property
    def COMM_SELF(self) -> Comm:  # noqa: N802
        return self._alone[self.world.here]

    @staticmethod
    def Is_finalized() -> bool:  # noqa: N802
        return False

    @staticmethod
    def Query_thread() -> int:  # noqa: N802
        return SimulatedMpi.THREAD_MULTIPLE


def simulate(monkeypatch: pytest.MonkeyPatch, node_of: Sequence[int]) -> World:
    """Return a world of ranks on these nodes, whose MPI all modules of the package use that are imported."""
    world = World(node_of)
    made = SimulatedMpi(world)
    for name, module in list(sys.modules.items()):
        if name.startswith("mpitrain.") and getattr(module, "MPI", None) is REAL:
            monkeypatch.setattr(module, "MPI", made)
    return world


def interleave(ranks: Mapping[int, Iterator[Any]], is_met: Callable[[int, Any], bool], seed: int = 0) -> dict[int, Any]:
    """Advance generators, which yield the conditions that they wait for, in an order of chance.

    Args:
        is_met: Returns whether the condition of a rank is met.

    Returns:
        The values that they return.

    Raises:
        Deadlock: All of them wait.
    """
    chance, results = random.Random(seed), dict[int, Any]()
    conditions: dict[int, Any] = dict.fromkeys(ranks)
    while conditions:
        ready = [rank for rank, condition in conditions.items() if condition is None or is_met(rank, condition)]
        if not ready:
            raise Deadlock
        rank = chance.choice(ready)
        try:
            conditions[rank] = next(ranks[rank])
        except StopIteration as end:
            results[rank] = end.value
            del conditions[rank]
    return results
