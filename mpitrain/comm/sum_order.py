"""The order in which the gradients of a step are added up: those of the ranks of a node, and the sums of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ..core.layout import Array
from ..core.ranges import Range
from ..core.sum_tree import order_of, share, subtrees
from .hierarchy import Hierarchy


@dataclass(frozen=True)
class SumOrder:
    """How the workers' gradients, rows in the memory of their nodes, are added up.

    An order of rows is as in ``core.sum_tree``.

    Attributes:
        n_rows: Number of rows of this node.
        own: The rows of this worker.
        order: The order of all rows of a run on one node.
        sums: The sums that this node exchanges with others: the row to which each is written, and the order of the rows
            that are added.
        counts: The number of these sums of every node.
        of_nodes: The order in which the sums of all nodes are added, node by node.
    """

    n_rows: int
    own: tuple[int, ...]
    order: Array
    sums: tuple[tuple[int, Array], ...]
    counts: tuple[int, ...]
    of_nodes: Array


def sum_order(hierarchy: Hierarchy, leaves: int | None, row_per_leaf: bool = False) -> SumOrder:
    """Return the order for this worker. Local.

    Args:
        leaves: The number of virtual workers, whose gradients are added by a tree; None if the gradients of the workers
            are added in the order of nodes and ranks.
        row_per_leaf: Whether a worker writes a row for each of its leaves, not their sums.
    """
    node, own = hierarchy.node, hierarchy.comm.rank
    counts, of_nodes = order_of_groups(hierarchy.members, leaves)
    if leaves is None:
        in_order = np.arange(node.size)
        return SumOrder(node.size, (node.rank,), in_order, ((node.rank, in_order),), counts, of_nodes)
    root, workers = (0, leaves), hierarchy.comm.size
    leaves_of = [range(*share(leaves, worker, workers)) for worker in range(workers)]
    pieces = [
        [(n, n + 1) for n in own_leaves] if row_per_leaf else subtrees(root, own_leaves) for own_leaves in leaves_of
    ]
    of_node = next(members for members in hierarchy.members if own in members)
    rows = {piece: index for index, piece in enumerate(piece for worker in of_node for piece in pieces[worker])}
    orders = [order_of(tree, _within(tree, rows)) for tree in subtrees(root, _leaves(of_node, leaves, workers))]
    return SumOrder(
        n_rows=len(rows),
        own=tuple(rows[piece] for piece in pieces[own]),
        order=orders[0],
        sums=tuple((int(order[0]), order) for order in orders),
        counts=counts,
        of_nodes=of_nodes,
    )


def order_of_groups(groups: Sequence[Sequence[int]], leaves: int | None) -> tuple[tuple[int, ...], Array]:
    """Return how many sums each group of workers exchanges, and the order in which the sums of all groups are added.

    Args:
        groups: The workers of each group; each worker is in one.
        leaves: As for ``sum_order``.
    """
    if leaves is None:
        return (1,) * len(groups), np.arange(len(groups))
    root, workers = (0, leaves), sum(map(len, groups))
    sums_of = [subtrees(root, _leaves(members, leaves, workers)) for members in groups]
    rows = {tree: row for row, tree in enumerate(chain.from_iterable(sums_of))}
    return tuple(map(len, sums_of)), order_of(root, rows)


def _leaves(workers: Sequence[int], leaves: int, of: int) -> set[int]:
    """Return the leaves of several of ``of`` workers."""
    return {leaf for worker in workers for leaf in range(*share(leaves, worker, of))}


def _within(tree: Range, rows: dict[Range, int]) -> dict[Range, int]:
    return {piece: row for piece, row in rows.items() if tree[0] <= piece[0] and piece[1] <= tree[1]}
