"""``sync``: all workers average every gradient; models ``strategy.sync`` and ``comm.internode``.

In a step, the ranks of a node compute. When all ranks of the node have a bucket, the bucket is summed over these ranks,
and sent to the nodes that own its ranges (reduce-scatter). Meanwhile earlier layers still compute. The owners update
their ranges and return the parameters (allgather), which may arrive while the next step computes. A rank's processor is
busy for a part of each transfer. The link and the processor work at the same time, and a transfer ends when both are
done.

A transfer needs ``exchange_cpu_s_per_byte`` of a rank's time. For gradients, the rank spends this time after its
backward pass; the total work does not depend on the moment. For parameters, the rank spends this time in the forward
pass, when it needs the parameters: MPI moves data only inside of calls, unless a thread makes the calls.
"""

from __future__ import annotations

import numpy as np

from ...core.layout import Array
from ..links import Senders
from ..rank_times import BucketTimes, RankTimes
from ..scenario import Scenario
from ..timeline import Timeline


def simulate(scenario: Scenario, times: RankTimes, steps: int, random: np.random.Generator, run: Timeline) -> None:
    """Simulate steps of ``sync`` on all nodes at once."""
    factors = times.factors(random, steps)
    exchange = _exchange(scenario, times)
    node_of, n_nodes = np.array(scenario.node_of), scenario.n_nodes
    begin, arrived = np.zeros(n_nodes), np.zeros((len(exchange.buckets), n_nodes))
    for step in range(steps):
        start = begin[node_of] + times.load_s
        forward = _forward_end(start, times.forward_s * factors[step], arrived[:, node_of], exchange)
        backward = forward + times.backward_s * factors[step]
        ready = [
            _max_of_nodes(forward + times.backward_s * factors[step] * bucket.leaves, node_of, n_nodes)
            for bucket in exchange.buckets
        ]
        computed = _max_of_nodes(backward, node_of, n_nodes)
        end, arrived = exchange.end_of_step(ready, computed)
        _record(run, begin, start, forward, backward, end, node_of)
        begin = end + times.loop_s
        run.ends.append(float(begin.max()))
    run.sent = exchange.senders.sent


def _forward_end(start: Array, forward_s: Array, arrived: Array, exchange: _OneNode) -> Array:
    """Return the time at which each rank ends its forward pass, which waits for the parameters of each bucket.

    Args:
        start, forward_s: Shape (ranks,).
        arrived: Shape (buckets, ranks): when the parameters have arrived.
    """
    now, done = start, 0.0
    for bucket, at in zip(reversed(exchange.buckets), reversed(list(arrived)), strict=True):
        uses = 1.0 - bucket.ready  # backward passes the layers in the opposite order
        now = np.maximum(now + (uses - done) * forward_s + exchange.late_cpu_s(bucket), at)
        done = uses
    return now + (1.0 - done) * forward_s


def _max_of_nodes(of_ranks: Array, node_of: Array, n_nodes: int) -> Array:
    latest = np.full(n_nodes, -np.inf)
    np.maximum.at(latest, node_of, of_ranks)
    return latest


def _record(
    run: Timeline, begin: Array, start: Array, forward: Array, backward: Array, end: Array, node_of: Array
) -> None:
    if run.records:
        for rank, node in enumerate(node_of):
            run.add(rank, "load", begin[node], start[rank])
            run.add(rank, "forward", start[rank], forward[rank])
            run.add(rank, "backward", forward[rank], backward[rank])
            run.add(rank, "average", backward[rank], end[node])
            run.add(rank, "step", begin[node], end[node])


def _exchange(scenario: Scenario, times: RankTimes) -> _OneNode:
    if scenario.n_nodes == 1:
        return _OneNode(scenario, times)
    if times.codec is None:
        return _Divided(scenario, times)
    compression = scenario.config.compression
    assert compression is not None
    return (_LowRank if compression.rank else _Replicated)(scenario, times)


class _OneNode:
    """The ranks of one node update their parts of each bucket in shared memory."""

    def __init__(self, scenario: Scenario, times: RankTimes) -> None:
        self.times, self.link, self.nodes = times, scenario.between, scenario.n_nodes
        self.ranks, self.buckets = min(scenario.ranks_per_node), times.buckets()
        self.senders = Senders(scenario.between, scenario.n_nodes, times.exchange_cpu_s_per_byte)
        self.awaits_params = times.awaits_params

    def end_of_step(self, ready: list[Array], computed: Array) -> tuple[Array, Array]:
        """Return when each node ends the step, and when it has the parameters of each bucket.

        Args:
            ready: For each bucket, when all ranks of each node begin to send it, shape (nodes,).
            computed: When all ranks of each node have ended backward, shape (nodes,).

        Returns:
            Shapes (nodes,) and (buckets, nodes).
        """
        end = computed + self.times.update_s(self.ranks) / self.ranks + self.times.from_others_s(self.ranks)
        return end, np.zeros((len(ready), self.nodes))

    def late_cpu_s(self, bucket: BucketTimes) -> float:
        """Return a rank's seconds to receive a bucket's parameters in its forward pass."""
        return 0.0

    def transfer(self, when: Array, nbytes: float, busy: Array) -> tuple[Array, Array]:
        """Send from every node to all others, and receive as much.

        Args:
            when: When each node can begin.
            nbytes: Bytes that each node sends.
            busy: The times until which the processors of each node are busy.

        Returns:
            Two times for every node: when it has received everything, and until when its processors are busy.
        """
        messages = 2 * (self.nodes - 1) * self.link.message_s
        arrival = self.senders.send(when, nbytes).max() + self.link.latency_s
        busy = busy + messages + nbytes * self.times.exchange_cpu_s_per_byte / self.ranks
        return np.maximum(arrival, busy), busy


class _Divided(_OneNode):
    """Every node updates its ranges of the parameters."""

    def end_of_step(self, ready: list[Array], computed: Array) -> tuple[Array, Array]:
        times, others = self.times, (self.nodes - 1) / self.nodes
        owned = 1 / (self.nodes * self.ranks)
        busy, received = computed, []
        for bucket, at in zip(self.buckets, ready, strict=True):
            work = bucket.part * (times.sum_s(self.ranks) / self.ranks + times.from_others_s(self.ranks))
            arrival, busy = self.transfer(at + work, others * bucket.nbytes, busy + work)
            received.append(arrival)
        updated = []
        now = busy
        for bucket, arrival in zip(self.buckets, received, strict=True):
            work = bucket.part * (times.sum_s(self.nodes) + times.update_s(1)) * owned
            now = np.maximum(now, arrival) + work
            updated.append(now)
        order = range(len(self.buckets))
        if self.awaits_params:
            order = reversed(order)  # type: ignore[assignment]
        arrived, busy = np.zeros((len(self.buckets), self.nodes)), now
        for index in order:
            nbytes = others * self.buckets[index].nbytes
            if self.awaits_params:
                arrived[index] = self.senders.send(now, nbytes).max() + self.link.latency_s
            else:
                arrived[index], busy = self.transfer(updated[index], nbytes, busy)
        return (now if self.awaits_params else np.maximum(busy, arrived.max(axis=0))), arrived

    def late_cpu_s(self, bucket: BucketTimes) -> float:
        if not self.awaits_params or self.times.has_thread:
            return 0.0
        return (self.nodes - 1) / self.nodes * bucket.nbytes * self.times.exchange_cpu_s_per_byte / self.ranks


class _Replicated(_OneNode):
    """Gradients are encoded in both directions, and every node updates all parameters."""

    def end_of_step(self, ready: list[Array], computed: Array) -> tuple[Array, Array]:
        times, others = self.times, (self.nodes - 1) / self.nodes
        encode, decode = times.encode_s() / self.ranks, times.decode_s() / self.ranks
        share = times.sent_nbytes / times.nbytes
        busy, received = computed, []
        for bucket, at in zip(self.buckets, ready, strict=True):
            work = bucket.part * (
                times.sum_s(self.ranks) / self.ranks + times.from_others_s(self.ranks) + others * encode
            )
            arrival, busy = self.transfer(at + work, share * others * bucket.nbytes, busy + work)
            received.append(arrival)
        returned = []
        for bucket, arrival in zip(self.buckets, received, strict=True):
            own = bucket.part / self.nodes
            work = own * ((self.nodes - 1) * decode + times.sum_s(self.nodes) / self.ranks + encode)
            busy = np.maximum(busy, arrival) + work
            arrival, busy = self.transfer(busy, share * others * bucket.nbytes, busy)
            returned.append(arrival)
        for bucket, arrival in zip(self.buckets, returned, strict=True):
            work = bucket.part * (decode + times.update_s(1) / self.ranks)
            busy = np.maximum(busy, arrival) + work
        return busy, np.zeros((len(self.buckets), self.nodes))


class _LowRank(_OneNode):
    """PowerSGD: when the gradient is complete, the factors P and then Q are summed over the nodes."""

    def end_of_step(self, ready: list[Array], computed: Array) -> tuple[Array, Array]:
        times, others = self.times, (self.nodes - 1) / self.nodes
        busy = computed + (times.sum_s(self.ranks) + times.low_rank_s()) / self.ranks + times.from_others_s(self.ranks)
        for _ in range(4):  # reduce-scatter and allgather of P, then of Q
            arrival, busy = self.transfer(busy, others * times.sent_nbytes / 2, busy)
            busy = np.maximum(arrival, busy)
        busy = busy + times.update_s(1) / self.ranks
        return busy, np.zeros((len(self.buckets), self.nodes))
