"""Operations on simulated ranks of several nodes, advanced in any order, against their definitions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mpitrain.backend.collectives import Collectives, padded  # noqa: E402
from mpitrain.backend.members import Members  # noqa: E402
from mpitrain.backend.reductions import Reduction, reduction_of  # noqa: E402

from ...simulators.simulated_mpi import Deadlock, interleave  # noqa: E402
from ...support.simulated_groups import TOPOLOGIES, is_met, make_members, perform  # noqa: E402

ReduceOp = torch.distributed.ReduceOp
SIZES = (1, 128, 300)  # of float32: less than a block, one block, more


class Group:
    """The operations of all ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...]) -> None:
        self.members: list[Members] = make_members(monkeypatch, node_of)
        self.ranks = [Collectives(members) for members in self.members]
        self.size, self.node_of, self._performed = len(node_of), node_of, 0

    def perform(self, name: str, *of_ranks: Any, **options: Any) -> list[Any]:
        """Call an operation with the arguments of each rank, and those that are the same on all."""
        lists = [argument if isinstance(argument, list) else [argument] * self.size for argument in of_ranks]
        self._performed += 1

        def steps(rank: int) -> Iterator[Any]:
            return getattr(self.ranks[rank], name)(*(one[rank] for one in lists), **options)  # type: ignore[no-any-return]

        return perform(self.members, steps, self._performed)

    def tensors(self, n: int, seed: int = 0, dtype: Any = torch.float32) -> list[Tensor]:
        """Return a tensor for each rank."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(self.size, n, generator=generator, dtype=torch.float64)
        return list((3 * drawn).to(dtype).unbind())


@pytest.fixture(params=TOPOLOGIES, ids=lambda nodes: "".join(map(str, nodes)))
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(monkeypatch, request.param)


def reduced(tensors: list[Tensor], node_of: tuple[int, ...], reduction: Reduction) -> Tensor:
    """Combine the tensors of each node in the order of the ranks, then those of the nodes in their order."""

    def fold(parts: list[Tensor]) -> Tensor:
        result = parts[0]
        for part in parts[1:]:
            result = reduction.combine(result, part, out=torch.empty_like(result))
        return result

    nodes = dict.fromkeys(node_of)
    return fold([fold([t for t, on in zip(tensors, node_of, strict=True) if on == node]) for node in nodes])


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (ReduceOp.SUM, torch.float32),
        (ReduceOp.AVG, torch.float64),
        (ReduceOp.MAX, torch.bfloat16),
        (ReduceOp.PRODUCT, torch.int32),
    ],
    ids=str,
)
def test_all_reduce_combines_in_the_order_of_ranks_and_nodes(group: Group, n: int, op: Any, dtype: Any) -> None:
    reduction, tensors = reduction_of(op, dtype), group.tensors(n, dtype=dtype)
    expected = reduced([tensor.clone() for tensor in tensors], group.node_of, reduction)
    if op == ReduceOp.AVG:
        expected = expected / group.size
    group.perform("all_reduce", [[tensor] for tensor in tensors], reduction)
    for tensor in tensors:
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("sizes", [(3, 0, 5), (100, 28, 1), (0, 0), (500, 3)], ids=str)
def test_several_tensors_are_reduced_together(group: Group, sizes: tuple[int, ...]) -> None:
    reduction = reduction_of(ReduceOp.SUM, torch.float32)
    tensors = [group.tensors(n, seed) for seed, n in enumerate(sizes)]
    expected = [reduced([tensor.clone() for tensor in row], group.node_of, reduction) for row in tensors]
    group.perform("all_reduce", [[row[rank] for row in tensors] for rank in range(group.size)], reduction)
    for row, sums in zip(tensors, expected, strict=True):
        assert all(torch.equal(tensor, sums) for tensor in row)


def test_a_block_may_be_written_before_the_operation(group: Group) -> None:
    reduction = reduction_of(ReduceOp.SUM, torch.float32)
    for n in (5, 0, 200):
        first, second = group.tensors(n), group.tensors(n, 1)
        expected = [reduced([t.clone() for t in row], group.node_of, reduction) for row in (first, second)]
        staged = [own.stage([tensor]) for own, tensor in zip(group.ranks, first, strict=True)]
        assert set(staged) == {bool(n) and len(set(group.node_of)) == 1 and group.size > 1}
        group.perform("barrier")
        group.perform("all_reduce", [[tensor] for tensor in first], reduction, is_staged=staged[0])
        for own, tensor in zip(group.ranks, second, strict=True):  # nothing follows what a rank has written
            own.skip() if own is group.ranks[-1] or not staged[0] else own.stage([tensor])
        group.perform("all_reduce", [[tensor] for tensor in second], reduction)
        for row, sums in zip((first, second), expected, strict=True):
            assert all(torch.equal(tensor, sums) for tensor in row)


@pytest.mark.parametrize("n", [0, *SIZES])
def test_reduce_changes_the_tensor_of_the_root_only(group: Group, n: int) -> None:
    reduction = reduction_of(ReduceOp.SUM, torch.float32)
    for root in range(group.size):
        tensors = group.tensors(n, root)
        before = [tensor.clone() for tensor in tensors]
        group.perform("reduce", [[tensor] for tensor in tensors], reduction, root)
        before[root] = reduced(before, group.node_of, reduction)
        assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("n", [0, *SIZES])
def test_broadcast(group: Group, n: int) -> None:
    for root in range(group.size):
        tensors = group.tensors(n, root)
        expected = tensors[root].clone()
        group.perform("broadcast", [[tensor] for tensor in tensors], root)
        assert all(torch.equal(tensor, expected) for tensor in tensors)


@pytest.mark.parametrize("n", [0, *SIZES])
@pytest.mark.parametrize("whole", [False, True])
def test_all_gather(group: Group, n: int, whole: bool) -> None:
    tensors, size = group.tensors(n), group.size
    gathered = [torch.full((size, n), torch.nan) for _ in range(size)]
    outputs = [[out.view(-1)] if whole else list(out.unbind()) for out in gathered]
    group.perform("all_gather", outputs, [[tensor] for tensor in tensors])
    assert all(torch.equal(out, torch.stack(tensors)) for out in gathered)


@pytest.mark.parametrize("counts", [(2, 2, 2, 2, 2), (3, 0, 1, 4, 0), (0, 0, 0, 0, 0), (90, 1, 2, 3, 4)], ids=str)
def test_rows_of_different_numbers_are_joined(group: Group, counts: tuple[int, ...]) -> None:
    rows = [torch.randn(counts[rank], 3) for rank in range(group.size)]
    labels = [torch.arange(counts[rank]) + 10 * rank for rank in range(group.size)]
    for joined in group.perform("all_gather_rows", [list(pair) for pair in zip(rows, labels, strict=True)]):
        assert torch.equal(joined[0], torch.cat(rows)) and torch.equal(joined[1], torch.cat(labels))


@pytest.mark.parametrize("n", [0, *SIZES])
def test_gather_and_scatter(group: Group, n: int) -> None:
    tensors, size = group.tensors(n), group.size
    for root in range(size):
        row = [torch.full((n,), torch.nan) for _ in range(size)]
        group.perform("gather", [row if rank == root else [] for rank in range(size)], [[t] for t in tensors], root)
        assert all(map(torch.equal, row, tensors))
        received = [torch.full((n,), torch.nan) for _ in range(size)]
        sent = [tensors if rank == root else [] for rank in range(size)]
        group.perform("scatter", [[out] for out in received], sent, root)
        assert all(map(torch.equal, received, tensors))


@pytest.mark.parametrize("n", [0, *SIZES])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG], ids=str)
def test_reduce_scatter(group: Group, n: int, whole: bool, op: Any) -> None:
    size, reduction = group.size, reduction_of(op, torch.float64)
    tensors = [tensor.view(size, n) for tensor in group.tensors(n * size, dtype=torch.float64)]
    outputs = [torch.full((n,), torch.nan, dtype=torch.float64) for _ in range(size)]
    inputs = [[tensor.reshape(-1)] if whole else list(tensor.unbind()) for tensor in tensors]
    group.perform("reduce_scatter", [[out] for out in outputs], inputs, reduction)
    nodes = list(dict.fromkeys(group.node_of))
    first, *others = sorted(range(size), key=lambda rank: (nodes.index(group.node_of[rank]), rank))
    expected = tensors[first].clone()
    for rank in others:  # by node; a floating-point sum depends on the order
        expected += tensors[rank]
    expected /= size if op == ReduceOp.AVG else 1
    assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize("n", [0, *SIZES])
def test_all_to_all_of_equal_tensors(group: Group, n: int) -> None:
    size = group.size
    sent = [list(tensor.view(size, n).unbind()) for tensor in group.tensors(n * size)]
    received = [[torch.full((n,), torch.nan) for _ in range(size)] for _ in range(size)]
    group.perform("all_to_all", received, sent, True)
    for i in range(size):
        assert all(torch.equal(received[j][i], sent[i][j]) for j in range(size))


@pytest.mark.parametrize("seed", range(3))
def test_all_to_all_of_tensors_of_any_sizes(group: Group, seed: int) -> None:
    chance, size = random.Random(seed), group.size
    counts = [[chance.choice([0, 1, 5, 160]) for _ in range(size)] for _ in range(size)]
    sent = [[torch.randn(counts[i][j]) for j in range(size)] for i in range(size)]
    received = [[torch.empty(counts[i][j]) for i in range(size)] for j in range(size)]
    group.perform("all_to_all", received, sent, False)
    for i in range(size):
        assert all(torch.equal(received[j][i], sent[i][j]) for j in range(size))


def test_sizes_that_do_not_fit_are_an_error(group: Group) -> None:
    size = group.size
    sent = [[torch.ones(3) for _ in range(size)] for _ in range(size)]
    received = [[torch.ones(3 if rank else 4) for rank in range(size)] for _ in range(size)]
    with pytest.raises(ValueError, match=r"rank 0 sends 3 elements .* 4"):
        group.perform("all_to_all", received, sent, False)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG], ids=str)
def test_sparse_tensors_are_added(group: Group, op: Any) -> None:
    dense = [torch.randn(6, 2) * (torch.rand(6, 1) < 0.4) for _ in range(group.size)]
    dense[0] = torch.zeros(6, 2)  # a rank may have no elements
    sparse = [tensor.to_sparse(1) for tensor in dense]
    group.perform("all_reduce_sparse", sparse, reduction_of(op, torch.float32))
    expected = sum(dense[1:], dense[0]) / (group.size if op == ReduceOp.AVG else 1)
    for tensor in sparse:
        torch.testing.assert_close(tensor.to_dense(), expected)


def test_no_rank_leaves_a_barrier_before_all_have_entered(group: Group) -> None:
    for late in range(group.size if group.size > 1 else 0):
        steps = {rank: group.ranks[rank].barrier() for rank in range(group.size)}
        last = steps.pop(late)
        ended: list[int] = []

        def marked(rank: int, own: Iterator[Any], ended: list[int] = ended) -> Iterator[Any]:
            yield from own
            ended.append(rank)

        waiting = {rank: marked(rank, own) for rank, own in steps.items()}

        def met(rank: int, condition: Any) -> bool:
            return is_met(group.members[rank], condition)

        conditions = {rank: next(own) for rank, own in waiting.items()}
        for _ in range(3):
            for rank, own in waiting.items():
                if met(rank, conditions[rank]):
                    conditions[rank] = next(own)
        assert not ended

        def rest(rank: int, waiting: Any = waiting, conditions: Any = conditions) -> Iterator[Any]:
            yield conditions[rank]
            yield from waiting[rank]

        interleave({late: last, **{rank: rest(rank) for rank in waiting}}, met)
        assert sorted(ended) == sorted(waiting)


def test_operations_may_follow_each_other_in_any_interleaving(group: Group) -> None:
    """A rank may be one operation ahead of another one; buffers must not be overwritten too early."""
    reduction = reduction_of(ReduceOp.SUM, torch.float32)
    for seed in range(4):
        tensors = [group.tensors(n, n) for n in (200, 3, 150, 64)]
        expected = [reduced([t.clone() for t in row], group.node_of, reduction) for row in tensors]

        def program(rank: int, tensors: list[list[Tensor]] = tensors) -> Iterator[Any]:
            for row in tensors:
                yield from group.ranks[rank].all_reduce([row[rank]], reduction)

        perform(group.members, program, seed)
        for row, sums in zip(tensors, expected, strict=True):
            assert all(torch.equal(tensor, sums) for tensor in row)


def test_a_rank_that_does_not_take_part_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, (0, 0, 0))
    steps = {rank: group.ranks[rank].broadcast([torch.ones(3)], 0) for rank in (0, 1)}
    with pytest.raises(Deadlock):
        interleave(steps, lambda rank, condition: is_met(group.members[rank], condition))


def test_a_part_is_padded_with_zeros() -> None:
    assert padded(torch.tensor([[1, 2]]), torch.empty(4, dtype=torch.int64)).tolist() == [1, 2, 0, 0]
    assert padded(torch.ones(2, 2).t(), torch.empty(2, 2)).tolist() == [1] * 4
