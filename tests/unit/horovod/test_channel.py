"""The cycles of a process set on simulated ranks, advanced in any order: results, errors, and ranks that leave."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mpitrain.errors import HorovodInternalError  # noqa: E402
from mpitrain.horovod import channel as module, notices  # noqa: E402
from mpitrain.horovod.channel import Channel  # noqa: E402
from mpitrain.horovod.request import Handle, ReduceOp, Request  # noqa: E402
from mpitrain.horovod.settings import Settings  # noqa: E402
from mpitrain.horovod.timeline import Timeline  # noqa: E402

from ...simulators.simulated_mpi import Comm, World, simulate  # noqa: E402
from ...support.simulated_groups import make_small  # noqa: E402

NODES = [(0,), (0, 0, 0), (0, 1, 0)]
OPS: dict[ReduceOp, Callable[[Tensor], Tensor]] = {
    ReduceOp.Sum: lambda rows: rows.sum(0),
    ReduceOp.Average: lambda rows: rows.mean(0),
    ReduceOp.Min: lambda rows: rows.amin(0),
    ReduceOp.Max: lambda rows: rows.amax(0),
    ReduceOp.Product: lambda rows: rows.prod(0),
}


class Ranks:
    """The channels of all ranks.

    Args:
        settings: The settings of the channels.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...], **settings: Any) -> None:
        make_small(monkeypatch)
        monkeypatch.setattr(module, "_PAUSE_S", 0.0)
        self.world: World = simulate(monkeypatch, node_of)
        self.size, self._chance = len(node_of), random.Random(0)
        given = Settings(**{"fusion_bytes": 200, **settings})
        numbers = [10 + rank for rank in range(self.size)]  # the ranks in the world of a process set of some ranks

        def make(comm: Comm) -> Channel:
            return Channel(comm.Dup(), "set", numbers, given, Timeline())  # type: ignore[arg-type]

        self.channels: list[Channel] = self.world.run(make)

    def submit(self, rank: int, request: Request, *tensors: Tensor, splits: Tensor | None = None) -> Handle:
        return self.channels[rank].submissions.add(Handle(request, list(tensors), splits=splits))

    def advance(self, rounds: int = 400) -> None:
        """Let each rank continue, in an order of chance."""
        for _ in range(rounds * self.size):
            self.channels[self._chance.randrange(self.size)].advance()

    def perform(self, handles: list[Handle]) -> None:
        """Advance until all operations have ended."""
        for _ in range(200):
            self.advance(5)
            if all(handle.done for handle in handles):
                return
        raise AssertionError([handle.key for handle in handles if not handle.done])

    def look(self) -> None:
        for channel in self.channels:
            channel._looked = 0.0
            channel.look()


@pytest.fixture(params=NODES, ids=str)
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch, request.param)


def allreduce(name: str, n: int, op: ReduceOp = ReduceOp.Sum, scales: tuple[float, float] = (1.0, 1.0)) -> Request:
    return Request("allreduce", name, torch.float64, ((n,),), op, None, scales)


def rows_of(size: int, n: int, seed: int = 0) -> Tensor:
    return torch.randn(size, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
def test_allreduces_in_any_order_of_submission(ranks: Ranks, seed: int) -> None:
    chance = random.Random(seed)
    sizes = [3, 40, 1, 0, 130, 8]
    for round_ in range(3):  # in later rounds, the requests have numbers, and blocks are written early
        rows = [rows_of(ranks.size, n, 10 * round_ + i) for i, n in enumerate(sizes)]
        handles = []
        for rank in range(ranks.size):
            order = list(range(len(sizes)))
            if seed:
                chance.shuffle(order)
            for i in order:
                handles.append(ranks.submit(rank, allreduce(f"t{i}", sizes[i]), rows[i][rank].clone()))
                if chance.random() < 0.5:
                    ranks.advance(2)
        ranks.perform(handles)
        for handle in handles:
            assert handle.error is None
            expected = rows[int(handle.key[1][1:])].sum(0)
            torch.testing.assert_close(handle.result[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("node_of", NODES[1:], ids=str)
def test_blocks_that_are_written_early_are_used_only_if_all_ranks_agree(
    monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...]
) -> None:
    """After cycles in which all ranks announced the same, they write a block before they know what others announce."""
    usual = ["a", "b"]
    rounds = [
        [usual, usual, usual],
        [usual, usual, usual],
        [usual, usual, usual],
        [["a", "b", "c"], ["b", "a"], usual],
        [[], ["c"], ["c"]],
        [usual, usual, usual],
        [usual, usual, usual],
        [usual, usual, []],  # rank 2 writes nothing
        [[], [], usual],
        [usual, usual, usual],
        [["b"], ["a"], ["a"]],
        [["a"], ["b"], ["b"]],
    ]
    ranks, handles = Ranks(monkeypatch, node_of), list[tuple[Handle, str, int]]()
    counts = [dict.fromkeys("abc", 0) for _ in range(3)]
    for submitted in rounds:
        for rank, names in enumerate(submitted):
            for name in names:
                counts[rank][name] += 1
                number = counts[rank][name]
                tensor = torch.full((20 + ord(name),), 10.0**rank * number).double()
                handles.append((ranks.submit(rank, allreduce(name, len(tensor)), tensor), name, number))
        ranks.advance(30)
    for handle, _, number in handles:
        assert handle.done and handle.result[0].eq(111.0 * number).all()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 4.0)])
def test_reductions_and_factors(ranks: Ranks, op: ReduceOp, scales: tuple[float, float]) -> None:
    rows = rows_of(ranks.size, 30)
    handles = [ranks.submit(rank, allreduce("a", 30, op, scales), rows[rank].clone()) for rank in range(ranks.size)]
    ranks.perform(handles)
    expected = OPS[op](rows * scales[0]) * scales[1]
    for handle in handles:
        torch.testing.assert_close(handle.result[0], expected, rtol=1e-12, atol=1e-12)


def test_other_operations(ranks: Ranks) -> None:
    size, root = ranks.size, ranks.size - 1
    inputs = [rows_of(1 + rank, 2, rank) for rank in range(size)]
    sent = [rows_of(2 * size - 1, 2, 50 + rank) for rank in range(size)]
    splits = [torch.tensor([2] * rank + [1] + [2] * (size - 1 - rank)) for rank in range(size)]
    shared = [rows_of(size + 1, 2, 90 + rank) for rank in range(size)]
    gather, exchange = (Request(kind, kind, torch.float64, ((2,),)) for kind in ("allgather", "alltoall"))
    send = Request("broadcast", "b", torch.float64, ((4,),), None, root)
    reduce = Request("reducescatter", "r", torch.float64, ((size + 1, 2),), ReduceOp.Average, None, (2.0, 3.0))
    handles = [
        [
            ranks.submit(rank, gather, inputs[rank]),
            ranks.submit(rank, send, rows_of(size, 4)[rank]),
            ranks.submit(rank, exchange, sent[rank], splits=splits[rank]),
            ranks.submit(rank, reduce, shared[rank]),
            ranks.submit(rank, allreduce("s", 4, ReduceOp.Adasum), torch.full((4,), rank + 1.0).double()),
            ranks.submit(rank, Request("barrier", "")),
        ]
        for rank in range(size)
    ]
    before = [tensor.clone() for tensor in shared]
    ranks.perform([handle for row in handles for handle in row])
    totals = torch.stack(before).mean(0) * 6
    shares = torch.tensor_split(totals, size)  # the first ranks get one row more
    for rank, (gathered, broadcast, exchanged, part, adasum, barrier) in enumerate(handles):
        assert torch.equal(gathered.result[0], torch.cat(inputs))
        assert torch.equal(broadcast.result[0], rows_of(size, 4)[root])
        expected = [sent[other].split(splits[other].tolist())[rank] for other in range(size)]
        assert torch.equal(exchanged.result[0], torch.cat(expected))
        torch.testing.assert_close(part.result[0], shares[rank], rtol=1e-12, atol=1e-12)
        assert torch.equal(shared[rank], before[rank])  # an input does not change
        torch.testing.assert_close(adasum.result[0], torch.full((4,), (size + 1) / 2).double())  # parallel vectors
        assert barrier.done and barrier.error is None


@pytest.mark.parametrize("node_of", NODES[1:], ids=str)
def test_requests_that_differ_fail_on_all_ranks(monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...]) -> None:
    ranks = Ranks(monkeypatch, node_of)
    sizes = (3, 4, 3)
    handles = [ranks.submit(rank, allreduce("a", n), torch.ones(n).double()) for rank, n in enumerate(sizes)]
    ranks.perform(handles)
    assert all(isinstance(handle.error, HorovodInternalError) for handle in handles)
    assert all("11" in str(handle.error) for handle in handles)
    again = [ranks.submit(rank, allreduce("a", 2), torch.ones(2).double()) for rank in range(3)]
    ranks.perform(again)
    assert all(handle.result[0].tolist() == [3, 3] for handle in again)


@pytest.mark.parametrize("node_of", NODES[1:], ids=str)
def test_a_joined_rank_adds_zeros_until_all_have_joined(
    monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...]
) -> None:
    ranks = Ranks(monkeypatch, node_of)
    joins = [ranks.submit(1, Request("join", "join"))]
    handles = [ranks.submit(rank, allreduce("a", 3), torch.full((3,), rank + 1.0).double()) for rank in (0, 2)]
    ranks.perform(handles)
    assert all(handle.result[0].tolist() == [4, 4, 4] for handle in handles) and not joins[0].done
    joins += [ranks.submit(rank, Request("join", "join")) for rank in (2, 0)]
    ranks.perform(joins)
    assert len({handle.result for handle in joins}) == 1


@pytest.mark.parametrize("node_of", NODES[1:], ids=str)
def test_an_operation_that_a_rank_does_not_submit(
    monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.0)
    ranks = Ranks(monkeypatch, node_of, stall_s=0.0)
    handles = [ranks.submit(rank, allreduce("a", 3), torch.ones(3).double()) for rank in (0, 2)]
    for _ in range(3):
        ranks.look()  # the second look of a rank reports
        ranks.advance(50)
    assert not any(handle.done for handle in handles)
    (line, *_) = capsys.readouterr().err.splitlines()
    assert "'a'" in line and "rank 11" in line
    handles.append(ranks.submit(1, allreduce("a", 3), torch.ones(3).double()))
    ranks.perform(handles)
    assert all(handle.result[0].tolist() == [3, 3, 3] for handle in handles)


def test_an_operation_that_waits_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, (0, 0, 0), shutdown_s=0.0)
    first = ranks.submit(0, allreduce("a", 3), torch.ones(3).double())
    third = ranks.submit(2, allreduce("a", 3), torch.ones(3).double())
    ranks.advance(5)
    ranks.look()
    assert all(
        isinstance(handle.error, HorovodInternalError) and "11" in str(handle.error) for handle in (first, third)
    )
    with pytest.raises(HorovodInternalError):
        ranks.submit(0, allreduce("b", 3), torch.ones(3).double())


@pytest.mark.parametrize("node_of", NODES[1:], ids=str)
def test_a_rank_that_leaves_ends_the_operations_of_the_others(
    monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...]
) -> None:
    ranks = Ranks(monkeypatch, node_of)
    done = [ranks.submit(rank, allreduce("a", 3), torch.ones(3).double()) for rank in range(3)]
    ranks.perform(done)
    waiting = [ranks.submit(rank, allreduce("b", 3), torch.ones(3).double()) for rank in (0, 2)]
    ranks.advance(20)
    ranks.channels[1].leave()
    ranks.look()
    assert all(isinstance(handle.error, HorovodInternalError) and "11" in str(handle.error) for handle in waiting)


@pytest.mark.parametrize("stays", [None, 1])
def test_memory_is_freed_only_if_all_ranks_leave(monkeypatch: pytest.MonkeyPatch, stays: int | None) -> None:
    monkeypatch.setattr(notices, "_ANSWER_S", 0.0)
    ranks = Ranks(monkeypatch, (0, 1, 0))

    def program(comm: Comm) -> bool | None:
        channel = ranks.channels[comm.rank]
        if comm.rank == stays:
            return None
        channel.leave()
        channel.leave()  # has no effect
        return channel.free(float("inf") if stays is None else 0.0)

    assert ranks.world.run(program) == [None if rank == stays else stays is None for rank in range(3)]
