"""All ranks find the same operations ready, in the same order, whatever they submit in which cycle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from mpitrain.horovod.negotiation import Negotiation, Ready  # noqa: E402
from mpitrain.horovod.request import ReduceOp, Request  # noqa: E402

Submitted = tuple[Request, int]


def allreduce(name: str, shape: tuple[int, ...] = (3,), op: ReduceOp = ReduceOp.Sum) -> Request:
    return Request("allreduce", name, torch.float32, (shape,), op)


class Set:
    """The tables of all ranks of a process set."""

    def __init__(self, size: int) -> None:
        self.tables = [Negotiation(range(10, 10 + size)) for _ in range(size)]

    def cycle(self, submitted: Sequence[Sequence[Submitted]]) -> list[Ready]:
        """Announce the requests of each rank as a channel does; return what is ready, which must be equal on all."""
        announced, new = [], []
        for table, of_rank in zip(self.tables, submitted, strict=True):
            unknown: dict[Request, int] = {}
            pairs = []
            for request, number in of_rank:
                at = table.number_of(request)
                pairs.append([unknown.setdefault(request, -1 - len(unknown)) if at is None else at, number])
            announced.append(pairs)
            new.append([*unknown])
        ready = [table.receive(announced, new) for table in self.tables]
        assert all(of_rank == ready[0] for of_rank in ready)
        assert len({table.is_pending for table in self.tables}) == 1
        return ready[0]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(8))
def test_an_operation_is_ready_when_the_last_rank_has_submitted_it(size: int, seed: int) -> None:
    chance, ranks = random.Random(seed), Set(size)
    requests = [allreduce(f"t{i % 7}" if i % 3 else "", (i % 4,)) for i in range(40)]
    # Operations of equal names follow each other: a rank submits the next one only when the last one has ended.
    operations = [(request, index if not request.name else 0) for index, request in enumerate(requests)]
    positions, performed = [0] * size, set[int]()
    orders = [list(range(len(operations))) for _ in range(size)]
    for order in orders:  # any order of those with different names
        for _ in range(60):
            i = chance.randrange(len(order) - 1)
            if operations[order[i]][0].name != operations[order[i + 1]][0].name or not operations[order[i]][0].name:
                order[i], order[i + 1] = order[i + 1], order[i]
    submitted_by: dict[int, set[int]] = {}
    for _ in range(2000):
        of_ranks: list[list[Submitted]] = []
        for rank in range(size):
            row: list[Submitted] = []
            for _ in range(chance.randrange(4)):
                if positions[rank] == len(operations):
                    break
                index = orders[rank][positions[rank]]
                request, number = operations[index]
                is_open = any(
                    other not in performed and rank in ranks_of and operations[other][0].name == request.name
                    for other, ranks_of in submitted_by.items()
                )
                if request.name and is_open:
                    break
                submitted_by.setdefault(index, set()).add(rank)
                row.append((request, number))
                positions[rank] += 1
            of_ranks.append(row)
        ready = ranks.cycle(of_ranks)
        expected = {i for i, ranks_of in submitted_by.items() if len(ranks_of) == size} - performed
        assert sorted((r.request, r.number) for r in ready) == sorted(operations[i] for i in expected)
        assert not any(r.error for r in ready)
        performed |= expected
        if len(performed) == len(operations):
            break
    assert len(performed) == len(operations) and not ranks.tables[0].is_pending


@pytest.mark.parametrize(
    "other",
    [
        allreduce("a", (4,)),
        allreduce("a", op=ReduceOp.Average),
        Request("allreduce", "a", torch.float64, ((3,),), ReduceOp.Sum),
        Request("allreduce", "a", torch.float32, ((3,),), ReduceOp.Sum, None, (2.0, 1.0)),
        Request("broadcast", "a", torch.float32, ((3,),), None, 0),
    ],
    ids=["shape", "reduction", "type", "factor", "kind"],
)
def test_different_requests_of_one_name_fail_on_all_ranks(other: Request) -> None:
    ranks = Set(3)
    assert not ranks.cycle([[(allreduce("a"), 0)], [], [(allreduce("a"), 0)]])
    ready = ranks.cycle([[], [(other, 0)], []])
    assert ready and all(entry.error for entry in ready)
    assert {entry.key[0] for entry in ready} == {"allreduce", other.kind}
    assert all(str(rank) in entry.error for entry in ready for rank in (10, 11, 12))
    assert not ranks.tables[0].is_pending
    (again,) = ranks.cycle([[(allreduce("a"), 0)]] * 3)  # the name can be used again
    assert not again.error


def test_a_joined_rank_takes_part_in_allreduces_of_the_others() -> None:
    ranks, join = Set(3), (Request("join"), 7)
    assert not ranks.cycle([[(allreduce("a"), 0)], [(allreduce("a"), 0)], []])
    (entry,) = ranks.cycle([[], [], [join]])
    assert entry.request.name == "a" and not entry.error
    (minimum,) = ranks.cycle([[(allreduce("b", op=ReduceOp.Min), 0)], [(allreduce("b", op=ReduceOp.Min), 0)], []])
    assert "12" in minimum.error  # a rank without data has no minimum
    gather = Request("allgather", "c", torch.float32, ((),))
    (gathered,) = ranks.cycle([[(gather, 0)], [(gather, 0)], []])
    assert "12" in gathered.error
    assert not ranks.cycle([[join], [], []])
    (end,) = ranks.cycle([[], [(Request("join"), 9)], []])
    assert (end.request.kind, end.value) == ("join", 11)  # the last rank
    assert ranks.tables[0].next_number == 9 and not ranks.tables[0].joined


def test_absent_ranks_are_known() -> None:
    ranks = Set(4)
    ranks.cycle([[(allreduce("a"), 0)], [], [(allreduce("a"), 0)], []])
    assert ranks.tables[3].absent() == {("allreduce", "a", 0): [1, 3]}
    ranks.cycle([[], [(Request("join"), 0)], [], []])
    assert ranks.tables[0].absent() == {("allreduce", "a", 0): [3]}


def test_requests_are_numbered_only_once() -> None:
    ranks = Set(2)
    first, second = allreduce("a"), allreduce("b")
    ranks.cycle([[(first, 0), (second, 0)], [(second, 0), (first, 0)]])
    numbers = [[table.number_of(request) for request in (first, second)] for table in ranks.tables]
    assert numbers[0] == numbers[1] and sorted(numbers[0]) == [0, 1]
    assert ranks.tables[0].number_of(first._replace(shapes=((9,),))) is None


def test_ready_keys_distinguish_operations_without_a_name() -> None:
    entry = Ready(allreduce(""), 3)
    assert entry.key == ("allreduce", "", 3) != replace(entry, number=4).key
