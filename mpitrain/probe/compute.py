"""Times of loading, computing and updating on this rank, with the classes that training uses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ..comm.backoff import Backoff
from ..comm.cluster import Cluster
from ..comm.compression import make_codec
from ..comm.shared_memory import SharedArrays
from ..core.device import Device
from ..core.layout import Array, row_stride
from ..core.training_state import TrainingState
from ..data import BatchSource, InMemory, Loader, Streaming
from ..data.batch import Batch, Loading
from ..models.base import Model
from ..models.select import make_model
from ..plan.compression import parse_compression
from ..plan.job import Job
from ..plan.plan import Plan
from ..predict.measurements import CodecTimes, Noise, ServerTimes
from ..strategy.ps.shard import Push, Shard
from .turns import median_s

ROWS = (1, 2, 4)
_NOISE_BATCHES = 8


@dataclass(frozen=True)
class BatchTimes:
    """Medians for one batch size, in seconds; ``ready_s``: from the loss until each layer's gradient is final."""

    load_s: float
    forward_s: float
    backward_s: float
    ready_s: tuple[float, ...]


class RankModel:
    """A job's model and data on this rank alone, without a strategy.

    Args:
        plan: The plan of one worker.
        position: Position of the first batch in the data.
    """

    def __init__(self, job: Job, plan: Plan, devices: list[Device], position: int) -> None:
        self.plan, self._job = plan, job
        self._state = TrainingState(plan.layout, job.network.frozen)
        self.model: Model = make_model(job, plan, devices, self._state)
        size = plan.layout.size
        self.rows = np.zeros((max(ROWS), row_stride(size)), plan.dtype)
        self.vectors = {name: np.zeros(size, plan.dtype) for name in plan.vectors}
        self.params, self.grads = self.vectors["params"], self.rows[0, :size]
        job.network.initialize(plan.layout, self.params, plan.config.training.seed)
        self.model.bind(self.params, self.grads)
        self._updater = plan.updater(self.vectors, self._state.frozen)
        self._loader = _make_loader(job, plan, self.model)
        self._position, self._steps = position, 0

    def close(self) -> None:
        """Stop the loader and the model."""
        self._loader.close()
        self.model.close()

    def measure_batch(self, count: int, seconds: float) -> BatchTimes:
        """Measure batches of ``count`` examples for this number of seconds. Local."""
        until, steps = time.perf_counter() + seconds, list[list[float]]()
        self._step(count)
        while len(steps) < 5 or time.perf_counter() < until:
            steps.append(self._step(count))
        load, forward, backward, *ready = np.median(np.array(steps), axis=0).tolist()
        return BatchTimes(load, forward, backward, tuple(ready))

    def _step(self, count: int) -> list[float]:
        """Return the seconds of one step: loading, forward, backward, and until each layer's gradient is final."""
        began = time.perf_counter()
        batch = self._load(count)
        loaded = time.perf_counter()
        self.model.load_params()
        float(self.model.compute_loss(batch))
        forward = time.perf_counter()
        ready = np.full(len(self.plan.layer_starts), np.nan)
        starts = np.array(self.plan.layer_starts)

        def on_ready(start: int) -> None:
            ready[(starts >= start) & np.isnan(ready)] = time.perf_counter() - forward

        self.model.compute_grads(on_ready)
        end = time.perf_counter()
        ready[np.isnan(ready)] = end - forward
        return [loaded - began, forward - loaded, end - forward, *ready.tolist()]

    def _load(self, count: int) -> Batch:
        batch = self._loader.batch(self._position, count)
        self._position += count
        return batch

    def gradient(self, ready: Callable[[int], None] = lambda start: None) -> Array:
        """Return the gradient of the next batch, shape (layout.size,), valid until the next call. Local.

        Args:
            ready: Called as backward calls ``Strategy.ready``.
        """
        batch = self._load(self.plan.batch)
        self.model.load_params()
        float(self.model.compute_loss(batch))
        self.model.compute_grads(ready)
        return self.grads

    def update_s(self, rows: int, seconds: float) -> float:
        """Return the time to update the whole vector by the sum of ``rows`` gradients. Local."""
        updater, size = self._updater, self.plan.layout.size
        self.rows[1:] = 0
        if updater.needs_sums:
            return median_s(lambda: updater.update_all(self.grads, self._count()), seconds)
        return median_s(lambda: updater.update(0, size, self.rows[:rows], self._count()), seconds)

    def _count(self) -> int:
        self._steps += 1
        return self._steps - 1

    def copy_s(self, seconds: float) -> float:
        """Return the time to copy one vector. Local."""
        copy = np.empty_like(self.params)
        return median_s(lambda: np.copyto(copy, self.params), seconds)

    def handover_s(self, seconds: float) -> float:
        """Return the additional time to copy one vector if another core has written it. Local.

        0 if this rank may use one core only.
        """
        vector, copy = np.zeros_like(self.params), np.empty_like(self.params)

        def copy_time() -> float:
            began = time.perf_counter()
            np.copyto(copy, vector)
            return time.perf_counter() - began

        times: list[tuple[float, float]] = []
        with _two_cores() as on_other:
            if on_other is None:
                return 0.0
            until = time.perf_counter() + seconds
            while len(times) < 3 or time.perf_counter() < until:
                on_other(lambda: vector.fill(1))
                after_other = copy_time()
                vector.fill(2)
                times.append((after_other, copy_time()))
        after_other, after_own = np.median(times, axis=0).tolist()
        return max(0.0, after_other - after_own)

    def server_times(self, cluster: Cluster, seconds: float) -> ServerTimes:
        """Return the times of a shard that holds the whole vector. Local."""
        shared = SharedArrays(cluster.self_comm)
        size, out = self.plan.layout.size, np.empty_like(self.params)
        shard = Shard(shared, [(0, size)], self._updater, self.vectors, self._state.frozen, Backoff(False))
        shard.open(0)
        grads = self.grads.copy()
        apply_s = median_s(lambda: shard.apply(grads, Push(0)), seconds)
        read_s = median_s(lambda: shard.read(out), seconds)
        shared.free()
        return ServerTimes(apply_s, read_s)

    def codec_times(self, name: str, seconds: float) -> CodecTimes | None:
        """Return the times of a compression of the whole vector, for this number of seconds. Local.

        Except for ``powersgd``, a gradient is computed before each repetition, as in training: its elements are only
        partly in the caches.

        Returns:
            None if the codec cannot encode vectors of this type, or has no effect on them.
        """
        compression = parse_compression(name)
        if compression.rank:
            return _factor_times(self.grads, compression.rank, seconds)
        if self.plan.dtype.itemsize <= 2 or compression.name == self.plan.dtype.name:
            return None
        codec = make_codec(compression, self.plan.dtype)
        size = self.plan.layout.size
        encoded, residual, out = np.zeros(codec.nbytes(size), np.uint8), np.zeros_like(self.grads), self.grads.copy()
        times: list[tuple[float, float]] = []
        until = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < until:
            grads = self.gradient()
            began = time.perf_counter()
            codec.encode(grads, residual, encoded)
            middle = time.perf_counter()
            codec.decode(encoded, out)
            times.append((middle - began, time.perf_counter() - middle))
        encode_s, decode_s = np.median(times[1:], axis=0).tolist()  # the first repetition may have compiled kernels
        return CodecTimes(len(encoded) / self.grads.nbytes, encode_s, decode_s)

    def train(self, seconds: float) -> None:
        """Train on this rank alone for this number of seconds. Local."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self._step(self.plan.batch)
            self._updater.update_all(self.grads, self._count())

    def noise(self, count: int) -> Noise:
        """Return the gradient noise scale of this rank's parameters, from several batches of ``count`` examples. Local.

        The expected squared norm of a mean of B gradients is ``|G|^2 + trace(S) / B``, with the true gradient G and the
        covariance S of the gradients (McCandlish et al. 2018, appendix A.1). The norms for two values of B determine
        both terms.
        """
        total, of_batches = np.zeros(self.plan.layout.size), list[float]()
        for _ in range(_NOISE_BATCHES):
            self._step(count)
            total += self.grads
            of_batches.append(float(np.dot(self.grads, self.grads)))
        small, large = count, count * _NOISE_BATCHES
        of_mean, of_one = float(np.dot(total, total)) / _NOISE_BATCHES**2, float(np.mean(of_batches))
        gradient = (large * of_mean - small * of_one) / (large - small)
        trace = (of_one - of_mean) / (1 / small - 1 / large)
        return Noise(max(0.0, trace / gradient) if gradient > 0 else 0.0, self._steps)


@contextmanager
def _two_cores() -> Iterator[Callable[[Callable[[], object]], object] | None]:
    """Keep this thread on one core; yield a function that calls its argument on another core, or None. Local."""
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        yield None
        return
    own, other, *_ = sorted(cores)
    os.sched_setaffinity(0, {own})
    with ThreadPoolExecutor(1, initializer=lambda: os.sched_setaffinity(0, {other})) as executor:
        try:
            yield lambda function: executor.submit(function).result()
        finally:
            os.sched_setaffinity(0, cores)


def _factor_times(grads: Array, rank: int, seconds: float) -> CodecTimes:
    """Return the times of PowerSGD's products for a nearly square matrix of the gradient's size."""
    columns = max(1, int(len(grads) ** 0.5))
    matrix = grads[: len(grads) // columns * columns].reshape(-1, columns)
    q = np.ones((columns, rank), grads.dtype)
    p = matrix @ q
    out = np.empty_like(matrix)
    encode_s = median_s(lambda: (matrix @ q, matrix.T @ p), seconds)
    decode_s = median_s(lambda: np.subtract(matrix, np.matmul(p, q.T, out=out), out=out), seconds)
    return CodecTimes(rank * (len(p) + columns) / matrix.size, encode_s, decode_s)


def _make_loader(job: Job, plan: Plan, model: Model) -> BatchSource:
    split, training = job.train_split, plan.config.training
    dtype = None if job.network.takes_integers(split) or model.accepts_raw else plan.dtype
    loading = Loading(training.n_data_workers, training.batches_ahead, dtype=dtype)
    if (own := split.own_loader(training.seed, loading)) is not None:
        return own
    if split.block is not None:
        return Loader(split, Streaming(split), training.seed, dtype, stride=plan.batch)
    whole = split.read_batch(0, len(split))
    return Loader(split, InMemory(whole.examples, whole.labels), training.seed, dtype, stride=plan.batch)
