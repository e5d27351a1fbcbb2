"""Waits of simulated ranks: agreement on operations, timeouts, and ranks that have ended."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mpitrain.backend import waiting as module  # noqa: E402
from mpitrain.backend.members import Members  # noqa: E402
from mpitrain.backend.waiting import Waiting  # noqa: E402
from mpitrain.errors import CollectiveFailed  # noqa: E402

from ...simulators.simulated_mpi import MpiError  # noqa: E402
from ...support.simulated_groups import make_members, perform  # noqa: E402


class Store(dict[str, str]):
    """A store of one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


class Ranks:
    """The waits of all ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...]) -> None:
        monkeypatch.setattr(module, "_LATE_S", 0.0)
        monkeypatch.setattr(module, "_EXPLAIN_S", 0.0)
        monkeypatch.setattr(module, "_LOOK_S", -1.0)
        self.members: list[Members] = make_members(monkeypatch, node_of)
        self.store = Store()
        self.waits = [Waiting(members, self.store) for members in self.members]

    def signed(self, texts: list[str], signatures: list[int]) -> list[list[int]]:
        """Perform an operation of one phase with a text and a signature for each rank; return what was performed."""

        def steps(rank: int) -> Iterator[Any]:
            yield self.members[rank].staging.publish()
            performed.append(rank)

        performed: list[int] = []
        operations = [operation(text) for text in texts]

        def signed(rank: int) -> Iterator[Any]:
            text = texts[rank].encode() + b"\0"
            return self.waits[rank].signed(operations[rank], text, signatures[rank], steps(rank))

        perform(self.members, signed, len(texts))
        return [sorted(performed), [own.number for own in operations]]


def operation(text: str = "barrier", submitted: float = math.inf, timeout_s: float = 5.0) -> Any:
    return SimpleNamespace(text=text, number=-1, submitted=submitted, timeout_s=timeout_s)


def numbers(error: pytest.ExceptionInfo[CollectiveFailed]) -> list[int]:
    """Return the ranks or nodes that a message lists."""
    listed = re.search(r"(?:ranks?|nodes?) ([\d, ]+?) (?:did|of this)", str(error.value))
    assert listed is not None
    return [int(word) for word in listed[1].split(",")]


@pytest.mark.parametrize("node_of", [(0,), (0, 0, 0), (0, 1), (0, 1, 0), (0, 1, 2)], ids=str)
def test_operations_are_performed_if_the_signatures_agree(
    monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...]
) -> None:
    ranks, n = Ranks(monkeypatch, node_of), len(node_of)
    for number in range(3):
        assert ranks.signed(["sum"] * n, [number] * n) == [list(range(n)), [number] * n]
    assert [own.count for own in ranks.waits] == [3] * n


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize("node_of", [(0, 0, 0), (0, 1, 2)], ids=str)
def test_different_operations_are_named_with_their_ranks(
    monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...], odd: int
) -> None:
    ranks = Ranks(monkeypatch, node_of)
    texts = ["broadcast 0" if rank == odd else "all_reduce sum" for rank in range(3)]
    with pytest.raises(CollectiveFailed) as error:
        ranks.signed(texts, [hash(text) for text in texts])
    others = ", ".join(str(rank) for rank in range(3) if rank != odd)
    assert f" {odd}: broadcast 0" in str(error.value) and f"s {others}: all_reduce sum" in str(error.value)


def test_texts_that_differ_only_in_the_part_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CollectiveFailed, match="sum"):
        Ranks(monkeypatch, (0, 0)).signed(["sum", "sum"], [1, 2])


@pytest.mark.parametrize(
    ("node_of", "joined", "late", "absent"),
    [
        ((0, 0, 0), [0], [], [1, 2]),
        ((0, 0, 0), [0, 2], [], [1]),
        ((0, 1, 0, 1), [0, 2], [], [1, 3]),
        ((0, 1, 0, 1), [0], [3], [1, 2]),
        ((0, 1, 2), [0], [1], [2]),
    ],
    ids=str,
)
def test_a_timeout_names_the_ranks_that_are_absent(
    monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...], joined: list[int], late: list[int], absent: list[int]
) -> None:
    ranks = Ranks(monkeypatch, node_of)
    for rank in joined:
        ranks.members[rank].staging.publish()
    own = operation(submitted=-math.inf)
    own.number = 6
    for rank in late:  # ranks of other nodes that have timed out, too
        ranks.store.set(f"late/6/{rank}", "")
    with pytest.raises(CollectiveFailed) as error:
        ranks.waits[0].wait(own, SimpleNamespace(Test=lambda: False) if len(set(node_of)) > 1 else 1)
    assert numbers(error) == absent
    assert ("late/6/0" in ranks.store) == (len(set(node_of)) > 1)


def test_a_rank_that_has_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, (0, 1, 0, 0))
    ranks.members[0].staging.publish()
    ranks.members[3].staging.publish()
    for rank in (2, 3):  # rank 3 has joined the operation before
        ranks.members[rank].staging.mark_ended()
    ranks.waits[0]._looked = 1.0
    ranks.waits[0]._operation = operation()
    with pytest.raises(CollectiveFailed) as error:
        ranks.waits[0]._look()
    assert numbers(error) == [2]


def test_a_condition_that_is_met_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, (0, 0))
    phase = ranks.members[0].staging.publish()
    assert not ranks.waits[0].poll(phase) and not ranks.waits[0].poll(SimpleNamespace(Test=lambda: False))
    ranks.members[1].staging.publish()
    assert ranks.waits[0].poll(phase) and ranks.waits[0].poll(SimpleNamespace(Test=lambda: True))
    ranks.waits[0].wait(operation(), phase)
    tests = iter([False, False, True])
    ranks.waits[0].wait(operation(), SimpleNamespace(Test=lambda: next(tests)))
    assert next(tests, None) is None


def test_an_error_of_mpi_is_explained_by_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> bool:
        raise MpiError("truncated")

    ranks = Ranks(monkeypatch, (0, 1))
    with pytest.raises(CollectiveFailed, match="truncated"):
        ranks.waits[0].wait(operation(), SimpleNamespace(Test=fails))
    monkeypatch.setattr(module, "_EXPLAIN_S", math.inf)
    begun = [
        wait.signed(operation(text), text.encode() + b"\0", 0, iter([1]))
        for wait, text in zip(ranks.waits, ("all_reduce 3", "all_reduce 4"), strict=True)
    ]
    for steps in begun:
        next(steps)
    with pytest.raises(CollectiveFailed, match="0: all_reduce 3; node 1: all_reduce 4"):
        ranks.waits[0].wait(operation(), SimpleNamespace(Test=fails))
