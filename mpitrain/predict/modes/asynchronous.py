"""``async`` and ``ssp``: servers apply every gradient on arrival; models ``strategy.ps.asynchronous``."""

from __future__ import annotations

import numpy as np

from ...core.layout import Array
from ..rank_times import RankTimes
from ..scenario import Scenario
from ..timeline import Timeline
from .ps import Events, ParameterServers

_FACTORS = 64  # number of factors of step times, which a worker uses again and again


def simulate(scenario: Scenario, times: RankTimes, steps: int, random: np.random.Generator, run: Timeline) -> None:
    """Simulate steps of ``async``, or of ``ssp``, whose workers also wait for the slowest worker."""
    servers = ParameterServers(scenario, times, run)
    workers, mode = len(scenario.workers), scenario.config.mode
    bound = scenario.config.parallel.max_staleness if mode.bounds_staleness else None
    progress = _Progress(servers, workers, bound)
    factors = times.factors(random, _FACTORS)
    for worker in range(workers):
        servers.env.process(_work(servers, worker, factors[:, worker], progress))
    servers.finish(steps)


class _Progress:
    """The numbers of steps of all workers; no worker may be more than ``bound`` steps ahead of the slowest worker."""

    def __init__(self, servers: ParameterServers, workers: int, bound: int | None) -> None:
        self._env, self.bound = servers.env, bound
        self.counts, self._behind = [0] * workers, workers  # number of workers with the fewest steps
        self._lowest, self._advanced = 0, servers.env.event()

    def lead(self, worker: int) -> int:
        """Return how many steps a worker is ahead of the slowest worker."""
        return self.counts[worker] - self._lowest

    def count(self, worker: int) -> None:
        """Count a step of a worker."""
        self.counts[worker] += 1
        if self.lead(worker) == 1:
            self._behind -= 1
        if not self._behind:
            self._lowest += 1
            self._behind = self.counts.count(self._lowest)
            advanced, self._advanced = self._advanced, self._env.event()
            advanced.succeed()

    def wait(self, worker: int) -> Events:
        """Wait until the worker may begin another step."""
        while self.bound is not None and self.lead(worker) > self.bound:
            yield self._advanced


def _work(servers: ParameterServers, worker: int, factors: Array, progress: _Progress) -> Events:
    env, times, run = servers.env, servers.times, servers.run
    rank = servers.scenario.workers[worker]
    prefetches = servers.scenario.config.servers.prefetch_params
    yield from servers.read(worker)
    began, version = env.now, servers.version
    while True:
        # Prefetched parameters are read while the gradient is computed and sent.
        prefetched, next_version = env.process(servers.read(worker)) if prefetches else None, servers.version
        factor = factors[progress.counts[worker] % len(factors)]
        yield env.timeout(times.load_s + times.loop_s + (times.forward_s + times.backward_s) * factor)
        computed = env.now
        yield from servers.push(worker, times.apply_s)
        pushed = env.now
        run.staleness.append(servers.version - version if progress.bound is None else progress.lead(worker))
        servers.count_step()
        progress.count(worker)
        yield from progress.wait(worker)
        waited = env.now
        if not servers.is_local(worker, 0):
            # The next work item comes with the parameters of the first server, unless they are prefetched.
            yield from servers.message()
        if prefetched is None:
            yield from servers.read(worker, with_reply=True)
            next_version = servers.version
        else:
            if not servers.is_local(worker, 0):
                yield from servers.message()
            yield prefetched
        for kind, begin, end in (("forward", began, computed), ("push", computed, pushed), ("wait", pushed, waited)):
            run.add(rank, kind, begin, end)
        run.add(rank, "pull", waited, env.now)
        run.add(rank, "step", began, pushed)
        began, version = env.now, next_version
