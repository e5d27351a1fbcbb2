"""Sums by a tree have the same bits, whoever adds which leaves, on one node or several."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.comm.exchange import in_order
from mpitrain.comm.sum_order import SumOrder, sum_order
from mpitrain.core.kernels import sum_in_place, sum_rows
from mpitrain.core.layout import Array
from mpitrain.core.ranges import Range
from mpitrain.core.sum_tree import ADD, additions, halves, share, subtrees

LEAVES = (1, 2, 3, 4, 5, 7, 8, 12, 16, 21)
SIZE = 3000  # more than a block


def leaves_of(count: int) -> Array:
    rng = np.random.default_rng(count)
    scales = 10.0 ** rng.integers(-4, 4, (count, 1))
    return (rng.standard_normal((count, SIZE)) * scales).astype(np.float32)


def tree_sum(leaves: Array, root: Range) -> Array:
    """The definition."""
    if root[1] - root[0] == 1:
        return leaves[root[0]]
    left, right = halves(root)
    return tree_sum(leaves, left) + tree_sum(leaves, right)


def added(leaves: Array, root: Range) -> Array:
    """Add the leaves of a subtree one after the other, as a worker does."""
    results: list[Array] = []
    for leaf, count in zip(range(*root), additions(root), strict=True):
        total = leaves[leaf]
        for _ in range(count):
            total = results.pop() + total
        results.append(total)
    (total,) = results
    return total


def pieces_of(count: int, worker: int, workers: int, row_per_leaf: bool = False) -> list[Range]:
    leaves = range(*share(count, worker, workers))
    return [(leaf, leaf + 1) for leaf in leaves] if row_per_leaf else subtrees((0, count), leaves)


def order_on(nodes: list[list[int]], worker: int, count: int | None, row_per_leaf: bool = False) -> SumOrder:
    own = next(members for members in nodes if worker in members)
    comm = SimpleNamespace(rank=worker, size=sum(map(len, nodes)))
    node = SimpleNamespace(rank=own.index(worker), size=len(own))
    return sum_order(SimpleNamespace(comm=comm, node=node, members=nodes, n_nodes=len(nodes)), count, row_per_leaf)


def total_on(nodes: list[list[int]], leaves: Array, row_per_leaf: bool = False) -> Array:
    """Sum the leaves as the ranks of these nodes do."""
    count, workers, received = len(leaves), sum(map(len, nodes)), []
    for members in nodes:
        orders = [order_on(nodes, worker, count, row_per_leaf) for worker in members]
        rows = np.full((orders[0].n_rows, SIZE), np.nan, np.float32)
        for worker, order in zip(members, orders, strict=True):
            for row, piece in zip(order.own, pieces_of(count, worker, workers, row_per_leaf), strict=True):
                rows[row] = added(leaves, piece)
        total = np.empty(SIZE, np.float32)
        if len(nodes) == 1:
            sum_rows(rows, orders[0].order, 0, SIZE, 1.0, total)
            return total
        for row, order_of_row in orders[0].sums:
            sum_in_place(rows, order_of_row, 0, SIZE, 1.0, row)
            received.append(rows[row])
        assert len(orders[0].sums) == orders[0].counts[nodes.index(members)]
    in_order(orders[0].of_nodes)(np.array(received), total)
    return total


@pytest.mark.parametrize("row_per_leaf", [False, True])
@pytest.mark.parametrize("count", LEAVES)
def test_any_number_of_workers_gives_the_bits_of_the_tree(count: int, row_per_leaf: bool) -> None:
    leaves = leaves_of(count)
    expected = tree_sum(leaves, (0, count)).tobytes()
    for workers in range(1, count + 1):
        assert total_on([[*range(workers)]], leaves, row_per_leaf).tobytes() == expected, workers


@pytest.mark.parametrize(
    "nodes",
    [
        [[0], [1]],
        [[0, 1], [2, 3]],
        [[0, 1, 2], [3, 4]],
        [[0, 2, 4], [1, 3]],  # ranks that are numbered across the nodes
        [[0], [1, 2, 3], [4, 5, 6]],
        [[0, 1, 2, 3], [4, 5, 6], [7]],
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [8, 12, 13])
@pytest.mark.parametrize("row_per_leaf", [False, True])
def test_any_nodes_give_the_bits_of_the_tree(nodes: list[list[int]], count: int, row_per_leaf: bool) -> None:
    leaves = leaves_of(count)
    assert total_on(nodes, leaves, row_per_leaf).tobytes() == tree_sum(leaves, (0, count)).tobytes()


@pytest.mark.parametrize("count", LEAVES)
def test_workers_have_all_leaves_in_their_order_and_equal_shares(count: int) -> None:
    for workers in range(1, count + 1):
        shares = [share(count, worker, workers) for worker in range(workers)]
        assert [leaf for part in shares for leaf in range(*part)] == [*range(count)]
        assert {hi - lo for lo, hi in shares} <= {count // workers, -(-count // workers)}
        pieces = [piece for worker in range(workers) for piece in pieces_of(count, worker, workers)]
        assert [leaf for piece in pieces for leaf in range(*piece)] == [*range(count)]


def test_without_virtual_workers_rows_are_added_in_the_order_of_ranks() -> None:
    order = order_on([[0, 1, 2, 3], [4, 5]], 2, None)
    assert order.own == (2,) and order.counts == (1, 1)
    assert order.order.tolist() == order.sums[0][1].tolist() == [0, 1, 2, 3]
    assert order.of_nodes.tolist() == [0, 1]


def test_three_rows_need_no_temporary_memory() -> None:
    assert order_on([[0, 1, 2]], 0, 3).order.tolist() == [0, 1, 2]
    assert order_on([[0, 1, 2, 3]], 0, 4).order.tolist() == [0, 1, ADD, 2, 3, ADD, ADD]
