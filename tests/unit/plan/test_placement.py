"""Placement of variables on servers: every element is on exactly one server; the policy determines which."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpitrain.core.layout import Layout
from mpitrain.errors import JobError
from mpitrain.plan.placement import assign_servers, ranges_of

LAYOUT = Layout.pack(
    [
        ("dense1.weight", (64, 100), "param"),
        ("dense1.bias", (100,), "param"),
        ("dense2.weight", (100, 10), "param"),
        ("dense2.bias", (10,), "param"),
        ("norm.mean", (3,), "state"),
    ]
)
POLICIES = ["round_robin", "greedy", "partitioned"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_every_element_lies_on_exactly_one_server(policy, servers):
    pieces = assign_servers(LAYOUT, servers, policy, 4)
    owners = np.zeros(LAYOUT.size, int)
    for piece in pieces:
        assert piece.entry.start <= piece.start < piece.stop <= piece.entry.stop
        owners[piece.start : piece.stop] += 1
    used = np.concatenate([np.arange(e.start, e.stop) for e in LAYOUT.entries])
    assert (owners[used] == 1).all()
    assert owners.sum() == len(used)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_ranges_cover_the_vector_once(policy, servers):
    pieces = assign_servers(LAYOUT, servers, policy, 4)
    covered = np.zeros(LAYOUT.size, int)
    for server in range(servers):
        ranges = ranges_of(pieces, server, LAYOUT)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges)), "neighbours are joined"
        for lo, hi in ranges:
            covered[lo:hi] += 1
    assert (covered == 1).all()


def servers_of(pieces):
    return {piece.entry.name: piece.server for piece in pieces}


def test_round_robin_deals_in_the_order_of_the_vector():
    assert list(servers_of(assign_servers(LAYOUT, 2, "round_robin", 4)).values()) == [0, 1, 0, 1, 0]


def test_greedy_gives_the_largest_to_the_least_loaded():
    assert servers_of(assign_servers(LAYOUT, 2, "greedy", 4)) == {
        "dense1.weight": 0,
        "dense2.weight": 1,
        "dense1.bias": 1,
        "dense2.bias": 1,
        "norm.mean": 1,
    }


def test_partitioned_cuts_every_large_variable_evenly():
    sizes = {}
    for piece in assign_servers(LAYOUT, 3, "partitioned", 4):
        sizes.setdefault(piece.entry.name, []).append(piece.stop - piece.start)
    assert len(sizes["dense1.weight"]) == len(sizes["dense2.weight"]) == 3
    assert max(sizes["dense1.weight"]) - min(sizes["dense1.weight"]) <= 16
    assert len(sizes["dense2.bias"]) == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "pins",
    [{"dense1.weight": 2}, lambda name, shape, nbytes: 2 if shape == (64, 100) and nbytes == 25_600 else None],
    ids=["name", "function"],
)
def test_a_pinned_variable_lies_whole_where_it_is_pinned(policy, pins):
    pieces = [p for p in assign_servers(LAYOUT, 3, policy, 4, pins) if p.entry.name == "dense1.weight"]
    assert [(p.server, p.stop - p.start) for p in pieces] == [(2, 6400)]


@pytest.mark.parametrize(
    ("pins", "pattern"),
    [
        ({"dense1.wieght": 0}, "dense1.wieght"),
        ({"dense1.bias": 3}, "server 3"),
        ({"dense1.bias": "a"}, "server 'a'"),
        ([1, 2], r"\[1, 2\]"),
        (lambda name: 0, "TypeError"),
    ],
)
def test_wrong_pins_are_named(pins, pattern):
    with pytest.raises(JobError, match=pattern):
        assign_servers(LAYOUT, 3, "greedy", 4, pins)
