"""A configuration on some ranks and links, whose speed is predicted."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from ..errors import ConfigError
from ..plan.config import RunConfig
from ..plan.roles import server_ranks
from .measurements import LinkTimes, Probe

# TCP over Ethernet: 1,448 bytes of data in a frame of 1,538 bytes on the wire.
EFFICIENCY = 1448 / 1538
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_WITHIN = LinkTimes(1e-6, 1e-6, 4e9, 4e9, 0.0, 0.0)  # used if the probe has not measured a link
_BETWEEN = LinkTimes(20e-6, 4e-6, 10e9 / 8 * EFFICIENCY, 10e9 / 8 * EFFICIENCY, 0.0, 0.4e-9)


@dataclass(frozen=True)
class Scenario:
    """A configuration to predict.

    Attributes:
        config: The options of the run: mode, servers, compression and others.
        ranks_per_node: Number of ranks of each node.
        cores_per_node: Cores that a node's ranks share.
        batch: Examples per worker and gradient.
        within, between: Transfers within a node, and between nodes. All ranks of a node share ``node_bytes_per_s``.
        limits_receiver: Whether the rate of a node's link also limits the bytes that the node receives.
        slow: Factor of the compute time of some workers, by their index.
        spreads: Whether the times of steps vary as the probe has measured.
        learners: Number of learners (``--join``), each with these ranks; their workers have consecutive indices in
            ``slow``. None for a run that is no learner.

    Raises:
        ConfigError: The roles cannot be assigned to these ranks.
    """

    config: RunConfig
    ranks_per_node: tuple[int, ...]
    cores_per_node: float
    batch: int
    within: LinkTimes
    between: LinkTimes
    limits_receiver: bool = True
    slow: Mapping[int, float] = field(default_factory=dict)
    spreads: bool = True
    learners: int | None = None

    def __post_init__(self) -> None:
        self.config.check_ranks(self.n_ranks)
        if self.config.servers.ps_hosts is not None:
            raise ConfigError("--ps-hosts cannot be predicted: use --ps-placement")
        if self.config.virtual_workers is not None:
            raise ConfigError("--virtual-workers cannot be predicted: remove it")
        if not self.config.mode.simulation:
            raise ConfigError(
                f"--mode {self.config.mode.name} is your own class, whose speed cannot "
                f"be predicted: use one of the built-in modes"
            )
        if self.config.uses_servers and not self.config.servers.ps and self.n_nodes > 1:
            raise ConfigError(
                f"--mode {self.config.mode.name} on several nodes requires parameter servers: pass --ps 1 or more"
            )
        last, workers = max(self.slow, default=0), len(self.workers) * (self.learners or 1)
        if last >= workers:
            raise ConfigError(f"worker {last} cannot be slow: there are {workers} workers")

    @property
    def n_ranks(self) -> int:
        return sum(self.ranks_per_node)

    @property
    def n_nodes(self) -> int:
        return len(self.ranks_per_node)

    @cached_property
    def node_of(self) -> list[int]:
        """The node of each rank."""
        return list(chain.from_iterable([node] * count for node, count in enumerate(self.ranks_per_node)))

    @cached_property
    def servers(self) -> list[int]:
        """The ranks that are servers."""
        node_of, options = self.node_of, self.config.servers
        if not options.ps:
            return []
        return server_ranks(node_of, [str(node) for node in node_of], options.ps, options.ps_placement)

    @cached_property
    def workers(self) -> list[int]:
        """The ranks that compute gradients."""
        servers = set(self.servers)
        return [rank for rank in range(self.n_ranks) if rank not in servers]

    @cached_property
    def gradients_per_step(self) -> int:
        """Gradients that one step uses."""
        return self.config.gradients_per_step(len(self.workers))


def scenario_of(
    probe: Probe, config: RunConfig, ranks_per_node: tuple[int, ...] | None = None, batch: int | None = None
) -> Scenario:
    """Return a configuration on the ranks and links that a probe has measured, or on other ranks."""
    return Scenario(
        config,
        ranks_per_node or probe.ranks.ranks_per_node,
        probe.ranks.cores_per_node,
        batch or probe.job.batch,
        probe.within or _WITHIN,
        _with_measured_sums(probe) or _BETWEEN,
    )


def _with_measured_sums(probe: Probe) -> LinkTimes | None:
    """Return the link between nodes with the highest rate that was measured, in messages or in sums of gradients."""
    link, exchanges = probe.between, probe.exchanges
    if link is None or exchanges is None:
        return link
    rate = max(link.node_bytes_per_s, link.bytes_per_s, 1 / exchanges.sum_s_per_byte)
    return dataclasses.replace(link, node_bytes_per_s=rate)


def shaped(link: LinkTimes, rate: float, burst: float = 0.0) -> LinkTimes:
    """Return a link with another rate.

    Args:
        rate: Bytes/s of data that a node sends.
        burst: Bytes that are sent at once after a pause.
    """
    return dataclasses.replace(link, bytes_per_s=rate, node_bytes_per_s=rate, burst_bytes=burst)


def parse_rate(text: str) -> float:
    """Return the bytes of data per second of a link rate such as ``10gbit``.

    Raises:
        ConfigError: The text is not a rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    if match is None or not float(match[1]):
        raise ConfigError(f"--link {text}: must be a number and kbit, mbit or gbit, such as 10gbit")
    return float(match[1]) * _UNITS[match[2]] / 8 * EFFICIENCY
