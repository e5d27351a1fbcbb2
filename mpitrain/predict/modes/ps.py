"""The common part of the modes with parameter servers: shards, servers, links, and the requests of workers; with simpy.

Workers on a server's node read and update its shard in shared memory, one at a time under its lock. Other workers send
requests, which a server answers one after the other. Models ``strategy.ps.store``, ``strategy.ps.server`` and
``comm.rpc``.

Many servers are simulated as a few groups. The servers of a group work at the same time. A group's link has the sum of
the rates of its servers' links. No worker shares memory with these servers.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from ..links import Sender
from ..rank_times import RankTimes
from ..scenario import Scenario
from ..timeline import Timeline

Events = Generator[Any, Any, Any]
_MOST_GROUPS = 2


class ParameterServers:
    """The shards of a run, and the links to them.

    Attributes:
        env: The simulation and its clock.
        stepped: The event of the end of the present step.
        version: Number of steps that have been applied.
        n_servers: Number of servers.
    """

    def __init__(self, scenario: Scenario, times: RankTimes, run: Timeline) -> None:
        self.env = simpy.Environment()
        self.scenario, self.times, self.run = scenario, times, run
        node_of, workers, servers = scenario.node_of, scenario.workers, scenario.servers
        self.node_of = [node_of[rank] for rank in workers]
        self.holders = [node_of[rank] for rank in servers] or [0]
        self.n_servers, self.version, self.stepped = len(self.holders), 0, self.env.event()
        self._burst_s_per_byte = max(times.push_cpu_s_per_byte, times.pull_cpu_s_per_byte)
        self._senders = [Sender(scenario.between, 1.0, self._burst_s_per_byte) for _ in range(scenario.n_nodes)]
        self._receivers = [Sender(scenario.between) for _ in range(scenario.n_nodes)]
        self._groups = [*range(min(self.n_servers, _MOST_GROUPS))]
        self._rate = scenario.between.node_bytes_per_s
        if len(self._groups) < self.n_servers:
            self._use_links_of_groups()
        self._locks = [simpy.Resource(self.env) for _ in self._groups]
        self._servers = [simpy.Resource(self.env) for _ in self._groups]
        nodes_of_workers = set(self.node_of) if not scenario.config.mode.drops_late_gradients else set()
        self._copies = [node in nodes_of_workers for node in self.holders]
        self._handovers = [self._handover_share(node) for node in self.holders]

    def _handover_share(self, node: int) -> float:
        """Return the probability that the rank that uses a shard is not the rank that changed it last."""
        if self.scenario.config.mode.drops_late_gradients:
            return 1.0  # servers write this memory, and workers read it
        users = self.node_of.count(node)
        users += users < len(self.node_of)  # the server is a further user if there are workers on other nodes
        return (users - 1) / max(1, users)

    def _use_links_of_groups(self) -> None:
        """Give each group its own node, with the links of its servers."""
        scale, n_nodes = self.n_servers / len(self._groups), self.scenario.n_nodes
        self._senders += [Sender(self.scenario.between, scale, self._burst_s_per_byte) for _ in self._groups]
        self._receivers += [Sender(self.scenario.between, scale) for _ in self._groups]
        self.holders = [n_nodes + group for group in self._groups]

    def is_local(self, worker: int, group: int) -> bool:
        """Return whether a worker shares memory with a group's shard."""
        return self.node_of[worker] == self.holders[group]

    def message(self) -> Events:
        """Send a message without a vector."""
        yield self.env.timeout(self.times.message_to_server_s)

    def _transfer(self, source: int, target: int, nbytes: float, cpu_s: float) -> Events:
        """Send a vector between two nodes; return the time that the receiver's processor is still busy with it.

        The sender, the link and the receiver work at the same time, so the slowest of them determines the time.

        Args:
            cpu_s: Processor time of both ranks together.
        """
        began = self.env.now
        arrival = self._senders[source].send(began, nbytes)
        if self.scenario.limits_receiver:
            arrival = max(arrival, self._receivers[target].send(max(began, arrival - nbytes / self._rate), nbytes))
        arrival = max(arrival, began + cpu_s / 2)
        yield self.env.timeout(arrival + self.times.message_to_server_s - began)
        return min(max(0.0, began + cpu_s - arrival), cpu_s / 2)

    def read(self, worker: int, with_reply: bool = False) -> Events:
        """Read the parameters of all shards.

        Args:
            with_reply: Whether the first server's parameters come with the reply to an earlier request.
        """
        yield self.env.all_of(
            [self.env.process(self._read_group(worker, group, with_reply and group == 0)) for group in self._groups]
        )

    def _read_group(self, worker: int, group: int, with_reply: bool) -> Events:
        times, part = self.times, self.times.nbytes / len(self._groups)
        read_s = (times.read_s + times.handover_s * self._handovers[group]) / self.n_servers
        if self.is_local(worker, group):
            yield from self._locked(group, read_s)
            return
        source, target = self.node_of[worker], self.holders[group]
        if not with_reply:
            yield from self.message()
        cpu_s = times.pull_cpu_s_per_byte * times.nbytes / self.n_servers
        with self._servers[group].request() as request:
            yield request
            if self._copies[group]:
                yield from self._locked(group, read_s)
            reply = self.env.process(self._transfer(target, source, part, cpu_s))
            yield self.env.timeout(cpu_s / 2)
        yield self.env.timeout((yield reply))

    def push(self, worker: int, apply_s: float) -> Events:
        """Send a gradient to all shards, and wait until each has applied it.

        Args:
            apply_s: Seconds to apply the whole gradient.
        """
        if any(not self.is_local(worker, group) for group in self._groups):
            yield self.env.timeout(self.times.encode_s())
        yield self.env.all_of([self.env.process(self._push_to(worker, group, apply_s)) for group in self._groups])

    def _push_to(self, worker: int, group: int, apply_s: float) -> Events:
        times = self.times
        handover_s = times.handover_s * times.vectors * self._handovers[group] if apply_s else 0.0
        apply_s = (apply_s + handover_s) / self.n_servers
        if self.is_local(worker, group):
            yield from self._locked(group, apply_s)
            return
        source, target = self.node_of[worker], self.holders[group]
        cpu_s = times.push_cpu_s_per_byte * times.sent_nbytes / self.n_servers
        rest = yield from self._transfer(source, target, times.sent_nbytes / len(self._groups), cpu_s)
        with self._servers[group].request() as request:
            yield request
            yield self.env.timeout(rest + times.decode_s() / self.n_servers)
            yield from self._locked(group, apply_s)
        yield from self.message()

    def round_trip(self, worker: int) -> Events:
        """Send a request to the step coordinator, on the first server's node, and wait for the reply."""
        if not self.is_local(worker, 0):
            yield from self.message()
            yield from self.message()

    def _locked(self, group: int, seconds: float) -> Events:
        with self._locks[group].request() as request:
            yield request
            yield self.env.timeout(seconds)

    def finish(self, steps: int) -> None:
        """Run until this number of steps has been applied."""
        done = self.env.event()
        self.env.process(self._watch(steps, done))
        self.env.run(done)
        self.run.sent = np.array([sender.sent / sender.scale for sender in self._senders])  # of one node

    def _watch(self, steps: int, done: simpy.Event) -> Events:
        while self.version < steps:
            yield self.stepped
        done.succeed()

    def count_step(self) -> None:
        """Count a step that ends now."""
        self.version += 1
        self.run.ends.append(self.env.now)
        stepped, self.stepped = self.stepped, self.env.event()
        stepped.succeed()
