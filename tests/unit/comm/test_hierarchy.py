"""Nodes and ranks in any order: who exchanges which range with whom, and in which order sums are taken."""

from __future__ import annotations

import functools
from itertools import chain

import numpy as np
import pytest

from mpitrain.comm.allreduce import RangeAllreduce
from mpitrain.comm.hierarchy import Hierarchy
from mpitrain.core.layout import Array

from ...simulators.simulated_mpi import Comm, simulate

# The node of each rank; nodes are numbered by their first ranks.
NODES = [(0, 0), (0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0), (0, 1, 1, 0, 2, 0, 2), (0, 1, 1, 2)]
SIZE = 200


def hierarchies(monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...]) -> list[Hierarchy]:
    """Return the hierarchy as each rank sees it."""
    world = simulate(monkeypatch, node_of)
    return world.run(lambda comm: Hierarchy(comm, comm.Split_type(3), cores=len(node_of)))


@pytest.mark.parametrize("node_of", NODES, ids=str)
def test_owners_are_in_the_order_of_the_nodes(monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...]) -> None:
    ranks = hierarchies(monkeypatch, node_of)
    n_nodes, smallest = max(node_of) + 1, min(map(node_of.count, node_of))
    owned = []
    for rank, (hierarchy, node) in enumerate(zip(ranks, node_of, strict=True)):
        assert hierarchy.members == [[r for r, on in enumerate(node_of) if on == each] for each in range(n_nodes)]
        index = node_of[:rank].count(node)
        assert (hierarchy.internode is not None) == (index < smallest)
        if hierarchy.internode is None:
            assert hierarchy.chunk(0, SIZE) == (0, 0)
            continue
        assert (hierarchy.internode.rank, hierarchy.internode.size) == (node, n_nodes)
        assert hierarchy.internode.members == tuple(members[index] for members in hierarchy.members)
        assert hierarchy.owned_range(0, SIZE) == hierarchy.owned_ranges(0, SIZE)[node]
        owned.append(hierarchy.owned_range(0, SIZE))
    elements = sorted(chain.from_iterable(range(*each) for each in owned))
    assert elements == [*range(SIZE)], "each element has one owner"


@pytest.mark.parametrize("node_of", NODES, ids=str)
def test_means_are_taken_in_the_order_of_nodes_and_ranks(
    monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...]
) -> None:
    """The values have very different sizes: another order has other bits."""
    rng, n = np.random.default_rng(0), len(node_of)
    values = (rng.standard_normal((n, SIZE)) * 10.0 ** rng.integers(-3, 4, (n, SIZE))).astype(np.float32)
    ranks, lo, hi = hierarchies(monkeypatch, node_of), 5, SIZE - 3

    def make(comm: Comm) -> tuple[Array, RangeAllreduce]:
        hierarchy = ranks[comm.rank]
        rows = hierarchy.shared.allocate((hierarchy.node.size, SIZE), np.float32)
        result = hierarchy.shared.allocate((SIZE,), np.float32)
        rows[hierarchy.node.rank] = values[comm.rank]
        return result, RangeAllreduce(hierarchy, rows, result, lo, hi, 1 / n)

    made = ranks[0].comm.world.run(make)
    for _, exchange in made:
        exchange.start()
    for _ in range(4):  # the phases of an exchange
        for _, exchange in made:
            exchange.progress()
    node_sums = [functools.reduce(np.add, values[members]) for members in ranks[0].members]
    expected = functools.reduce(np.add, node_sums) * np.float32(1 / n)
    for result, exchange in made:
        exchange.finish()
        assert result[lo:hi].tobytes() == expected[lo:hi].tobytes()
