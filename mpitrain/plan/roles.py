"""Choose the ranks that are parameter servers, from integers and names. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..core.words import counted
from ..errors import ConfigError

HOW_ROLES_ARE_GIVEN = "Start all processes with one command, 'mpitrain run -n N --ps K JOB': K of N become servers."
PsPlacement = Literal["spread", "pack", "first"]


def server_ranks(
    node_of: Sequence[int],
    host_of: Sequence[str],
    servers: int,
    placement: PsPlacement = "spread",
    hosts: Sequence[str] | None = None,
) -> list[int]:
    """Return the ranks that become servers, in the order of their task index.

    Args:
        node_of: For each rank, a number that is the same on all ranks of its node.
        host_of: For each rank, its host's name.
        servers: Number of servers; less than the number of ranks.
        placement: ``spread`` assigns one server per node, round-robin. ``pack`` fills the node with the most ranks,
            then the next node. ``first`` selects the lowest ranks. Within a node the lowest ranks become servers.
        hosts: Use only ranks on these hosts, round-robin in this order; overrides ``placement``.

    Raises:
        ConfigError: One of the hosts has no rank, or the hosts have too few ranks.
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
    available = sum(map(len, groups))
    if available < servers:
        raise ConfigError(
            f"--ps is {servers}, but only {counted(available, 'rank')} can be servers on "
            f"--ps-hosts {', '.join(hosts)}; add hosts or reduce --ps"
        )
    return _deal(groups, servers)


def _find_host(name: str, known: Sequence[str]) -> str:
    """Return the host of this name, ignoring domains: the scheduler and the host itself may use different domains."""
    matches = [host for host in known if host.split(".")[0] == name.split(".")[0]]
    if name in known:
        return name
    if len(matches) != 1:
        raise ConfigError(f"--ps-hosts names {name!r}: must be one of the ranks' hosts, {', '.join(known)}")
    return matches[0]


def _deal(groups: list[list[int]], count: int) -> list[int]:
    """Return the first rank of each group, then the second rank of each, and so on: ``count`` ranks in all."""
    rounds = max(map(len, groups))
    return [group[turn] for turn in range(rounds) for group in groups if turn < len(group)][:count]
