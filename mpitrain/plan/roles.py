"""Which ranks are parameter servers. Integers and names in, ranks out: nothing here communicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..errors import ConfigError

PsPlacement = Literal["spread", "pack", "first"]


def server_ranks(
    node_of: Sequence[int],
    host_of: Sequence[str],
    servers: int,
    placement: PsPlacement = "spread",
    hosts: Sequence[str] | None = None,
) -> list[int]:
    """The ranks that become servers, in the order of their task index.

    Args:
        node_of: For each rank, a number that its node's ranks share.
        host_of: For each rank, its host's name.
        servers: How many are wanted; fewer than there are ranks.
        placement: ``spread`` deals them out over the nodes, one a node first; ``pack`` fills the node with the most
            ranks, then the next; ``first`` takes the lowest ranks. Within a node the lowest ranks serve.
        hosts: Only ranks on these hosts, whatever else is said, dealt out over them in this order.

    Raises:
        ConfigError: A host is not among the ranks', or the hosts have too few ranks.
    """
    if hosts is not None:
        return _on_hosts(host_of, servers, hosts)
    if placement == "first":
        return list(range(servers))
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of):
        nodes.setdefault(node, []).append(rank)
    if placement == "pack":
        fullest = sorted(nodes.values(), key=len, reverse=True)
        return [rank for ranks in fullest for rank in ranks][:servers]
    return _deal(list(nodes.values()), servers)


def _on_hosts(host_of: Sequence[str], servers: int, hosts: Sequence[str]) -> list[int]:
    hosts = list(dict.fromkeys(_find_host(host, sorted(set(host_of))) for host in hosts))
    groups = [[rank for rank, name in enumerate(host_of) if name == host] for host in hosts]
    there = sum(map(len, groups))
    if there < servers:
        raise ConfigError(
            f"--ps {servers} servers do not fit the {there} rank{'s' * (there != 1)} on {', '.join(hosts)}: "
            "name more hosts in --ps-hosts, or give a lower --ps"
        )
    return _deal(groups, servers)


def _find_host(name: str, known: Sequence[str]) -> str:
    """The host of this name; schedulers leave out its domain, or have it where the host itself does not."""
    alike = [host for host in known if host.split(".")[0] == name.split(".")[0]]
    if name in known:
        return name
    if len(alike) != 1:
        raise ConfigError(f"--ps-hosts names {name!r}, and the ranks are on {', '.join(known)}: give one of these")
    return alike[0]


def _deal(groups: list[list[int]], count: int) -> list[int]:
    """The first of each group, then the second of each, until there are ``count``."""
    rounds = max(map(len, groups))
    return [group[turn] for turn in range(rounds) for group in groups if turn < len(group)][:count]
