"""MPI in one process: messages arrive in their order, and mistakes of a program are noticed."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ...simulators import simulated_mpi as module
from ...simulators.simulated_mpi import ANY_SOURCE, Comm, Deadlock, MpiError, World, interleave


def test_collective_operations_have_the_values_of_all_ranks() -> None:
    def program(comm: Comm) -> list[Any]:
        comm.Barrier()
        return [comm.allgather(comm.rank), comm.bcast(10 + comm.rank, root=2), comm.allreduce(comm.rank, operator.add)]

    assert World([0, 0, 1]).run(program) == [[[0, 1, 2], 12, 3]] * 3


def test_communicators_of_nodes_and_of_some_ranks() -> None:
    def program(comm: Comm) -> list[Any]:
        node, odd = comm.Split_type(1), comm.Split(comm.rank % 2, key=-comm.rank)
        assert odd is not None
        copies = [comm.Dup(), comm.Dup()]
        return [node.allgather(comm.rank), odd.allgather(comm.rank), copies[1].bcast(comm.rank, 1)]

    found = World([7, 3, 7, 3]).run(program)
    assert found == [[[rank % 2, rank % 2 + 2], [rank % 2 + 2, rank % 2], 1] for rank in range(4)]


def test_messages_of_a_pair_keep_their_order() -> None:
    comms = [World([0, 0, 0]).comm(0)]
    comms += [comms[0].world.comm(rank) for rank in (1, 2)]
    outs = [np.zeros(1) for _ in range(4)]
    places = [comms[0].Irecv(out, source, tag) for out, source, tag in zip(outs, (1, 1, 1, ANY_SOURCE), (0, 0, 5, 0))]  # noqa: B905
    sent = [
        comms[rank].Isend(np.array([value]), 0, tag) for rank, value, tag in ((1, 1.0, 5), (2, 2.0, 0), (1, 3.0, 0))
    ]
    assert [request.Test() for request in sent] == [True, True, True]
    assert [request.Test() for request in places] == [True, False, True, True]
    assert not comms[1].Isend(np.array([4.0]), 2).Test()  # nobody receives it
    comms[1].Isend(np.array([5.0]), 0)
    assert places[1].Test() and [out[0] for out in outs] == [3, 5, 1, 2]


def test_a_message_that_is_too_long_is_an_error() -> None:
    world = World([0, 0])
    place = world.comm(1).Irecv(np.zeros(1), 0)
    world.comm(0).Isend(np.zeros(2), 1)
    with pytest.raises(MpiError):
        place.Test()


def test_different_operations_are_noticed() -> None:
    with pytest.raises(AssertionError, match="barrier"):
        World([0, 0]).run(lambda comm: comm.Barrier() if comm.rank else comm.allgather(1))


def test_an_exception_of_a_rank_ends_all() -> None:
    def program(comm: Comm) -> None:
        if comm.rank == 1:
            raise ArithmeticError
        comm.Barrier()

    with pytest.raises(ArithmeticError):
        World([0, 0]).run(program)


def test_ranks_that_wait_for_each_other_are_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.01)
    with pytest.raises(Deadlock):
        World([0, 0]).run(lambda comm: comm.Recv(np.zeros(1), 1 - comm.rank))

    def waits() -> Iterator[str]:
        yield "never"

    with pytest.raises(Deadlock):
        interleave({0: waits()}, lambda rank, condition: False)


def test_generators_are_advanced_in_any_order() -> None:
    def steps(rank: int, log: list[int]) -> Iterator[int]:
        for _ in range(3):
            log.append(rank)
            yield 0

    orders = set()
    for seed in range(10):
        log: list[int] = []
        interleave({rank: steps(rank, log) for rank in range(3)}, lambda rank, condition: True, seed)
        assert sorted(log) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        orders.add(tuple(log))
    assert len(orders) > 5
