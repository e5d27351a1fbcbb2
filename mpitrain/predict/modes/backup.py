"""``backup``: a step uses the gradients that arrive first, and drops later ones; models ``strategy.ps.backup``."""

from __future__ import annotations

import numpy as np

from ...core.layout import Array
from ..rank_times import RankTimes
from ..scenario import Scenario
from ..timeline import Timeline
from .ps import Events, ParameterServers

_FACTORS = 64  # number of factors of step times, which a worker uses again and again


def simulate(scenario: Scenario, times: RankTimes, steps: int, random: np.random.Generator, run: Timeline) -> None:
    """Simulate steps of ``backup``: with servers, or in the shared memory of one node."""
    servers = ParameterServers(scenario, times, run)
    step = _Step(servers, scenario.gradients_per_step)
    factors = times.factors(random, _FACTORS)
    for worker in range(len(scenario.workers)):
        servers.env.process(_work(servers, step, worker, factors[:, worker]))
    servers.finish(steps)


class _Step:
    """The gradients of the present step."""

    def __init__(self, servers: ParameterServers, needed: int) -> None:
        self._servers, self._needed = servers, needed
        self._on_one_node = servers.scenario.n_nodes == 1
        self._admitted = self._arrived = 0

    def admit(self, step: int) -> bool:
        """Take a place for a gradient in its step if one is free; return whether the gradient has a place."""
        if step != self._servers.version or self._admitted == self._needed:
            return False
        self._admitted += 1
        return True

    def arrive(self) -> Events:
        """Count a gradient that has arrived; wait until the step is applied."""
        servers, step = self._servers, self._servers.version
        self._arrived += 1
        if self._arrived == self._needed:
            yield servers.env.timeout(self._apply_s())
            self._admitted = self._arrived = 0
            servers.count_step()
        while servers.version == step:
            yield servers.stepped

    def _apply_s(self) -> float:
        times, needed = self._servers.times, self._needed
        if self._on_one_node:
            return times.update_s(needed) / needed + times.from_others_s(needed)  # every worker updates one range
        return (times.sum_s(needed) + times.update_s(1)) / self._servers.n_servers


def _work(servers: ParameterServers, step: _Step, worker: int, factors: Array) -> Events:
    env, times, run, count = servers.env, servers.times, servers.run, 0
    rank, on_one_node = servers.scenario.workers[worker], servers.scenario.n_nodes == 1
    while True:
        began, version = env.now, servers.version
        yield from servers.round_trip(worker)
        if not on_one_node:
            yield from servers.read(worker)
        pulled, factor = env.now, factors[count % len(factors)]
        count += 1
        yield env.timeout(times.load_s + times.loop_s + (times.forward_s + times.backward_s) * factor)
        computed = env.now
        yield from servers.round_trip(worker)
        if step.admit(version):
            run.staleness.append(0)
            if not on_one_node:
                yield from servers.push(worker, 0.0)
            yield from step.arrive()
        else:
            run.dropped += 1
        run.add(rank, "pull", began, pulled)
        run.add(rank, "forward", pulled, computed)
        run.add(rank, "push", computed, env.now)
        run.add(rank, "step", began, env.now)
