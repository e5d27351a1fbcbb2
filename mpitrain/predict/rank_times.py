"""The times of a rank's work in a scenario, computed from the times that a probe has measured."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass

import numpy as np

from ..core.layout import Array
from ..core.ranges import buckets_of
from ..errors import ConfigError
from .measurements import CodecTimes, Probe
from .scenario import Scenario

# Processor time of an MPI transfer relative to plain TCP: the value without a measurement, and the maximum of a
# measured value. A longer measured time is due to the link.
_TYPICAL, _MOST = 4.0, 6.0
_LEAST_NBYTES = 16 << 20  # as in ``comm.background_sums``
_NOTICE_S = 100e-6  # time until a server that polls notices a request


@dataclass(frozen=True)
class BucketTimes:
    """A bucket of the gradient.

    Attributes:
        nbytes: The size of the bucket in bytes.
        part: The bucket's fraction of the vector.
        ready: The fraction of the backward pass after which the bucket is final.
        leaves: The fraction of the backward pass after which the bucket's transfer begins.
    """

    nbytes: float
    part: float
    ready: float
    leaves: float


class RankTimes:
    """Seconds that a rank of a scenario needs for each part of its work, while all ranks of its node work.

    Attributes:
        load_s, forward_s, backward_s: Seconds for a batch.
        apply_s, read_s: A server's seconds for the whole vector.
        copy_s: Seconds to copy a vector.
        handover_s: Additional seconds if another core has written the vector.
        loop_s: Seconds for the rest of a step.
        nbytes: Bytes of a vector.
        vectors, awaits_params: See ``JobFacts``.
        has_thread: Whether a thread lets MPI move gradients and parameters while the rank computes.
        stretch: Factor of all times because ranks share cores.
        codec: The compression between nodes; None if there is none.
    """

    def __init__(self, probe: Probe, scenario: Scenario) -> None:
        compute, job = probe.compute, probe.job
        self._probe, self._scenario = probe, scenario
        busiest = max(_ranks_that_compute(scenario))
        self.stretch = max(1.0, busiest / scenario.cores_per_node)
        together = compute.together if len(scenario.workers) > 1 else 1.0
        together = max(1.0, together / probe.ranks.stretch)
        batch, factor = scenario.batch, self.stretch * together
        self.load_s = factor * at_batch(compute.batches, compute.load_s, batch)
        self.forward_s = factor * at_batch(compute.batches, compute.forward_s, batch)
        self.backward_s = factor * at_batch(compute.batches, compute.backward_s, batch)
        self.apply_s, self.read_s = self.stretch * probe.server.apply_s, self.stretch * probe.server.read_s
        self.copy_s, self.loop_s = self.stretch * compute.copy_s, self.stretch * compute.loop_s
        self.handover_s = self.stretch * compute.handover_s
        self.nbytes = float(job.nbytes)
        self.vectors, self.awaits_params = job.vectors, job.awaits_params
        self.has_thread = job.nbytes >= _LEAST_NBYTES and max(scenario.ranks_per_node) <= scenario.cores_per_node
        self.codec = _codec(probe, scenario)

    @property
    def compute_s(self) -> float:
        """Seconds to load a batch and to compute its gradient."""
        return self.load_s + self.forward_s + self.backward_s

    def update_s(self, rows: int) -> float:
        """Return the seconds to update the whole vector by the sum of this number of gradients."""
        compute = self._probe.compute
        return self.stretch * at_batch(compute.update_rows, compute.update_s, rows)

    def sum_s(self, rows: int) -> float:
        """Return the seconds to sum this number of vectors: to read each, and to write the sum."""
        return self.copy_s * (rows + 1) / 2 if rows > 1 else 0.0

    def from_others_s(self, ranks: int) -> float:
        """Return the additional seconds of a vector's update that is divided among this number of a node's ranks.

        A rank reads the other ranks' gradients in its own part, and later the parameters in the other ranks' parts.
        """
        return 2 * self.handover_s * (ranks - 1) / ranks

    def encode_s(self) -> float:
        """Return the seconds to encode the whole vector; 0 without compression."""
        return 0.0 if self.codec is None else self.stretch * self.codec.encode_s

    def decode_s(self) -> float:
        """Return the seconds to decode the whole vector; 0 without compression."""
        return 0.0 if self.codec is None else self.stretch * self.codec.decode_s

    @property
    def sent_nbytes(self) -> float:
        """Bytes of a gradient as it is sent between nodes."""
        return self.nbytes * (1.0 if self.codec is None else self.codec.share)

    @property
    def exchange_cpu_s_per_byte(self) -> float:
        """Seconds of a rank for each byte that it sends, while it receives as much, in collective exchanges."""
        return self._cpu_s_per_byte("sum_s_per_byte", min(self._probe.ranks.ranks_per_node))

    @property
    def push_cpu_s_per_byte(self) -> float:
        """Seconds of both ranks for each byte of a pushed gradient."""
        return self._cpu_s_per_byte("push_s_per_byte")

    @property
    def pull_cpu_s_per_byte(self) -> float:
        """Seconds of both ranks for each byte of pulled parameters."""
        return self._cpu_s_per_byte("pull_s_per_byte")

    def _cpu_s_per_byte(self, name: str, ranks: int = 1) -> float:
        """Return the processor seconds per byte that MPI moves between nodes: as measured by this number of ranks."""
        plain, measured = self._scenario.between.cpu_s_per_byte, self._probe.exchanges
        if measured is None:
            return self.stretch * (_TYPICAL * plain)
        return self.stretch * min(getattr(measured, name) * ranks, _MOST * plain)

    @property
    def message_to_server_s(self) -> float:
        """Seconds from a request until the receiver has noticed it, without the transfer of a vector."""
        probe, scenario = self._probe, self._scenario
        if probe.exchanges is None or probe.between is None:
            return scenario.between.latency_s + _NOTICE_S
        return max(0.0, probe.exchanges.request_s / 2 - probe.between.latency_s) + scenario.between.latency_s

    def low_rank_s(self) -> float:
        """Return the seconds of a node's work for ``powersgd``, without transfers."""
        probe = self._probe
        assert self.codec is not None
        if probe.exchanges is None or not probe.exchanges.low_rank_s or probe.between is None:
            return self.encode_s() + self.decode_s() + 4 * self.copy_s
        link, sent = probe.between, self.nbytes * self.codec.share
        transfers = 4 * link.latency_s + sent / link.node_bytes_per_s
        work = (probe.exchanges.low_rank_s - transfers) * min(probe.ranks.ranks_per_node)
        return self.stretch * max(work, self.codec.encode_s)

    def buckets(self) -> list[BucketTimes]:
        """Return the buckets in which ``sync`` averages gradients, in the order in which they are ready.

        MPI moves data only inside of calls, which backward makes after each layer. A large message is announced in the
        first call, accepted by its receiver in the second, and sent in the third. For large vectors, a thread makes the
        calls.
        """
        job, scenario = self._probe.job, self._scenario
        ready = dict(zip(reversed(job.layer_starts), reversed(job.ready), strict=True))
        calls = [*sorted(set(job.ready)), 1.0, 1.0]
        buckets = []
        for lo, hi in buckets_of(job.layer_starts, job.elements, scenario.config.parallel.bucket_bytes // job.itemsize):
            at = ready.get(lo, 1.0) if lo else 1.0
            leaves = at if self.has_thread else calls[bisect(calls, at, hi=len(calls) - 2) + 1] if at < 1.0 else 1.0
            buckets.append(BucketTimes((hi - lo) * job.itemsize, (hi - lo) / job.elements, at, leaves))
        return buckets

    def factors(self, random: np.random.Generator, steps: int) -> Array:
        """Return the factors of compute times of each worker in ``steps`` steps, shape (steps, workers)."""
        scenario, count = self._scenario, len(self._scenario.workers)
        measured = np.array(self._probe.step_factors if scenario.spreads else (1.0,))
        factors = random.choice(measured, (steps, count))
        for worker, factor in scenario.slow.items():
            factors[:, worker] *= factor
        return factors


def at_batch(sizes: tuple[int, ...], seconds: tuple[float, ...], size: float) -> float:
    """Return the time for a size by linear interpolation; beyond the measured sizes by the nearest two."""
    if len(sizes) == 1:
        return seconds[0] * size / sizes[0]
    index = int(np.clip(np.searchsorted(sizes, size), 1, len(sizes) - 1))
    (a, b), (at_a, at_b) = sizes[index - 1 : index + 1], seconds[index - 1 : index + 1]
    return max(at_a + (at_b - at_a) * (size - a) / (b - a), 0.1 * min(seconds))


def _ranks_that_compute(scenario: Scenario) -> list[int]:
    """Return the number of workers of each node."""
    counts = [0] * scenario.n_nodes
    for rank in scenario.workers:
        counts[scenario.node_of[rank]] += 1
    return counts


def _codec(probe: Probe, scenario: Scenario) -> CodecTimes | None:
    compression = scenario.config.compression
    if compression is None or scenario.n_nodes == 1:
        return None
    name = str(compression)
    if name in probe.codecs:
        return probe.codecs[name]
    for measured, times in probe.codecs.items():
        kind, _, number = measured.partition(":")
        if kind == compression.name and number:
            scale = (compression.rank or compression.fraction) / float(number)
            return CodecTimes(times.share * scale, times.encode_s, times.decode_s)
    if name == "float16" and "bfloat16" in probe.codecs:
        return probe.codecs["bfloat16"]
    raise ConfigError(f"the probe has no times for --compress {name}: must be one of {', '.join(probe.codecs)}")
