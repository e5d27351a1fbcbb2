"""``local``: workers train alone, and average periodically; models ``strategy.local`` and ``comm.allreduce``."""

from __future__ import annotations

import numpy as np

from ...core.layout import Array
from ..links import Senders
from ..rank_times import RankTimes
from ..scenario import Scenario
from ..timeline import Timeline


def simulate(scenario: Scenario, times: RankTimes, steps: int, random: np.random.Generator, run: Timeline) -> None:
    """Simulate steps of ``local``, in rounds; each round ends with the average of one fragment."""
    parallel = scenario.config.parallel
    every, overlap = parallel.steps_per_average // parallel.n_fragments, parallel.steps_of_overlap
    rounds = max(3, -(-steps // every))
    senders = Senders(scenario.between, scenario.n_nodes, times.exchange_cpu_s_per_byte)
    now = np.zeros(len(scenario.workers))
    step_s = times.compute_s + times.update_s(1) + times.loop_s
    fixed_s = step_s - times.forward_s - times.backward_s
    for _ in range(rounds):
        factors = times.factors(random, every)
        took = fixed_s + (times.forward_s + times.backward_s) * factors
        ends = now + np.cumsum(took, axis=0)
        for rank in range(len(now) if run.records else 0):
            for before, end in zip([now[rank], *ends[:-1, rank]], ends[:, rank], strict=True):
                run.add(rank, "step", before, end)
        run.ends += ends.max(axis=1).tolist()[:-1]
        averaged = _average(scenario, times, senders, ends[-1])
        hidden = overlap * step_s  # the time that overlapping the exchange with steps hides
        now = np.maximum(ends[-1], averaged - hidden) if overlap else np.full_like(now, averaged)
        for rank in range(len(now) if run.records else 0):
            run.add(rank, "average", ends[-1, rank], now[rank])
        run.ends.append(float(now.max()))
    run.sent = senders.sent


def _average(scenario: Scenario, times: RankTimes, senders: Senders, ends: Array) -> float:
    """Return the time at which all workers have the average; worker i is ready at ``ends[i]``, shape (workers,)."""
    nodes, ranks, link = scenario.n_nodes, min(scenario.ranks_per_node), scenario.between
    others = (nodes - 1) / nodes
    now = float(ends.max())
    has_outer, part = scenario.config.parallel.outer_optimizer is not None, 1 / scenario.config.parallel.n_fragments
    for _ in range(1 if has_outer else times.vectors):
        now += part * (2 * times.copy_s + times.sum_s(ranks) / ranks + times.from_others_s(ranks))
        if nodes > 1:
            work = times.sum_s(nodes) / nodes + (times.encode_s() * (1 + 1 / nodes) + times.decode_s() * (1 + others))
            for _ in range(2):  # reduce-scatter and allgather
                nbytes = part * others * times.sent_nbytes
                busy = nbytes * times.exchange_cpu_s_per_byte / ranks + 2 * (nodes - 1) * link.message_s
                sent = float(senders.send(np.full(nodes, now), nbytes).max())
                now = max(sent + link.latency_s, now + busy)
            now += part * work / ranks
    return now + (part * times.update_s(1) / ranks / nodes if has_outer else 0.0)
