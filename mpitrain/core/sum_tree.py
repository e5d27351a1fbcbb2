"""Sums by one fixed binary tree, whoever computes which part of it.

The leaves are the micro-batches of a step. A rank that has consecutive leaves adds up the largest subtrees among them;
other ranks continue with the roots of these subtrees. The additions, and therefore the bits of the sum, are the same
for any assignment of leaves to ranks. (Li et al., EasyScale, arXiv:2208.14228, fix the order of sums in this way.)

An *order* says how rows are added. It is an array of int64: the indices of the rows, which are added from left to
right; or, if it ends with ``ADD``, the tree in postfix notation, in which ``ADD`` adds the last two results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from .layout import Array
from .ranges import Range

ADD = -1


def halves(node: Range) -> tuple[Range, Range]:
    """Return the two children of a node, a range of at least two leaves."""
    lo, hi = node
    middle = lo + (hi - lo + 1) // 2
    return (lo, middle), (middle, hi)


def subtrees(root: Range, leaves: Collection[int] | range) -> list[Range]:
    """Return the largest subtrees of ``root`` that consist of the given leaves, in ascending order."""
    if all(leaf in leaves for leaf in range(*root)):
        return [root]
    if root[1] - root[0] == 1:
        return []
    return [tree for child in halves(root) for tree in subtrees(child, leaves)]


def additions(root: Range) -> list[int]:
    """Return for each leaf of a tree how many additions follow it, if the leaves come in ascending order.

    Each of them adds a result to the result before it.
    """
    if root[1] - root[0] == 1:
        return [0]
    counts = [count for child in halves(root) for count in additions(child)]
    counts[-1] += 1
    return counts


def order_of(root: Range, rows: Mapping[Range, int]) -> Array:
    """Return the order in which rows, the sums of subtrees, are added to give the sum of ``root``.

    Args:
        rows: The index of the row of each of these subtrees, which cover the tree.
    """
    words = _postfix(root, rows)
    first, *others = indices = [word for word in words if word != ADD]
    from_left = [first, *(word for index in others for word in (index, ADD))]
    return np.array(indices if words == from_left else words, np.int64)  # without ADD, no temporary memory is needed


def _postfix(root: Range, rows: Mapping[Range, int]) -> list[int]:
    if root in rows:
        return [rows[root]]
    left, right = halves(root)
    return [*_postfix(left, rows), *_postfix(right, rows), ADD]


def share(leaves: int, rank: int, ranks: int) -> Range:
    """Return the leaves of a rank: consecutive ones, as many as those of the other ranks or one more."""
    return leaves * rank // ranks, leaves * (rank + 1) // ranks
