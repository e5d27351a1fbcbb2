"""The choice of the ranks that become servers."""

from __future__ import annotations

import pytest

from mpitrain.errors import ConfigError
from mpitrain.plan.roles import server_ranks

NODES = [0, 0, 2, 2, 2, 5]  # nodes with two, three and one rank
HOSTS = ["a", "a", "b", "b", "b", "c"]


@pytest.mark.parametrize(
    ("placement", "servers", "expected"),
    [
        ("spread", 1, [0]),
        ("spread", 3, [0, 2, 5]),
        ("spread", 5, [0, 2, 5, 1, 3]),
        ("pack", 2, [2, 3]),
        ("pack", 4, [2, 3, 4, 0]),
        ("first", 3, [0, 1, 2]),
        ("spread", 0, []),
    ],
)
def test_placement(placement, servers, expected):
    assert server_ranks(NODES, HOSTS, servers, placement) == expected


@pytest.mark.parametrize(
    ("hosts", "servers", "expected"), [(["b"], 2, [2, 3]), (["c", "a"], 3, [5, 0, 1]), (["a", "a"], 2, [0, 1])]
)
def test_named_hosts(hosts, servers, expected):
    assert server_ranks(NODES, HOSTS, servers, "spread", hosts) == expected


def test_domains_of_hosts_may_be_left_out():
    hosts = ["a.x", "b.x", "b.y"]
    assert server_ranks([0, 1, 2], hosts, 1, "spread", ["a"]) == [0]
    assert server_ranks([0, 1, 2], hosts, 1, "spread", ["b.y"]) == [2]
    assert server_ranks([0], ["a"], 1, "spread", ["a.x"]) == [0]
    with pytest.raises(ConfigError, match="'b'"):
        server_ranks([0, 1, 2], hosts, 1, "spread", ["b"])


@pytest.mark.parametrize(("hosts", "servers", "pattern"), [(["d"], 1, "'d'"), (["c"], 2, "--ps is 2.*1 rank.* c")])
def test_hosts_that_will_not_do(hosts, servers, pattern):
    with pytest.raises(ConfigError, match=pattern):
        server_ranks(NODES, HOSTS, servers, "spread", hosts)
