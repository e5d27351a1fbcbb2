"""The part of the parameters that one server holds: ranges of the vector, a lock, and a version.

A shard is in memory that the ranks of its node share. Every rank of the node reads and updates the shard without the
server. Workers on other nodes send requests to the server. The version counts steps. Reads and updates hold the lock,
so a read returns a single version, and updates are serialized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from ...comm.atomics import WORDS, acquire, load, release, store
from ...comm.backoff import Backoff
from ...comm.shared_memory import SharedArrays
from ...core.layout import Array
from ...core.ranges import Range
from ...monitor.trace import span
from ...optim.updater import Updater

_LOCK, _VERSION = 0, WORDS


class Push(NamedTuple):
    """How to apply a gradient.

    Attributes:
        version: The version of the parameters from which the gradient was computed.
        clip: Factor for the whole gradient.
        scaled: Whether to divide the learning rate by the staleness (Zhang, Gupta, Lian and Liu, Staleness-aware
            async-SGD, 2016, equation 6).
    """

    version: int
    clip: float = 1.0
    scaled: bool = False


class Shard:
    """One server's part of the parameters. Every method is local, and any rank of the node may call it.

    Construction is collective over the node. One rank of the node calls ``open`` before any other method.

    Args:
        shared: The shared memory of its node.
        ranges: Disjoint ranges of the vector, in ascending order.
        updater: Bound to the node's vectors, of which this shard updates only ``ranges``.
        vectors: The node's vectors by name, including ``params``, shape (layout.size,).
        frozen: The entries that the updater does not change for now.
        waiting: How to wait for the lock.
    """

    def __init__(
        self,
        shared: SharedArrays,
        ranges: Sequence[Range],
        updater: Updater,
        vectors: dict[str, Array],
        frozen: Array,
        waiting: Backoff,
    ) -> None:
        self.ranges, self.vectors, self.frozen, self._waiting = ranges, vectors, frozen, waiting
        self.size = sum(hi - lo for lo, hi in ranges)
        self._updater = updater
        self._words = shared.allocate((2 * WORDS,), np.int64)

    def open(self, step: int) -> None:
        """Start with version ``step``."""
        self._words[:] = 0
        store(self._words, _VERSION, step)

    @property
    def version(self) -> int:
        """Number of steps applied or skipped, including those before a resume."""
        return load(self._words, _VERSION)

    def read(self, out: Array, name: str = "params") -> int:
        """Copy the newest parameters, or another of ``vectors``, to the shard's ranges of ``out``.

        Args:
            out: Shape (layout.size,).

        Returns:
            The version of the copy.
        """
        vector = self.vectors[name]
        with self.locked():
            for lo, hi in self.ranges:
                out[lo:hi] = vector[lo:hi]
            return int(self._words[_VERSION])

    def apply(self, grads: Array, push: Push) -> int:
        """Update the parameters with one gradient; return its staleness: the number of steps since ``push.version``.

        Args:
            grads: Shape (layout.size,), or (``size``,): the ranges concatenated. ``grads`` is overwritten if the
                optimizer works by layers.
        """
        with self.locked():
            version = int(self._words[_VERSION])
            staleness = version - push.version
            rate_scale = 1.0 / max(1, staleness) if push.scaled else 1.0
            if self._updater.optimizer.layerwise:
                full = self._full_length(grads)
                rows = full[np.newaxis]
                self._updater.update_by_sums(self.ranges, rows, full, version, rate_scale=rate_scale)
            else:
                for lo, hi, origin in self._origins(compact=len(grads) == self.size):
                    self._updater.update(
                        lo, hi, grads[np.newaxis], version, origin=origin, clip=push.clip, rate_scale=rate_scale
                    )
            self._next_version()
        return staleness

    def apply_step(self, grads: Array, sum_over_servers: Callable[[Array], Array]) -> None:
        """Update the parameters with the sum of a step's gradients.

        Args:
            grads: The sum, shape (layout.size,); may be overwritten.
            sum_over_servers: Sums this shard's squares over all servers; called if norms of whole vectors are needed.
        """
        with self.locked():
            version = int(self._words[_VERSION])
            if self._updater.needs_sums:
                self._updater.update_by_sums(self.ranges, grads[np.newaxis], grads, version, sum_over_servers)
            else:
                for lo, hi in self.ranges:
                    self._updater.update(lo, hi, grads[np.newaxis], version)
            self._next_version()

    def accumulate(self, grads: Array, out: Array, first: bool) -> None:
        """Add a gradient, shaped as for ``apply``, to the shard's ranges of ``out``; overwrite them if ``first``."""
        for lo, hi, origin in self._origins(compact=len(grads) == self.size):
            part = grads[lo - origin : hi - origin]
            if first:
                out[lo:hi] = part
            else:
                out[lo:hi] += part

    def skip_step(self) -> None:
        """Count a step whose gradient is discarded."""
        with self.locked():
            self._next_version()

    def _full_length(self, grads: Array) -> Array:
        """Return a gradient of full length, with its ranges at their place in the vector."""
        params = self.vectors["params"]
        if len(grads) == len(params):
            return grads
        full = np.zeros_like(params)
        self.accumulate(grads, full, first=True)
        return full

    def _next_version(self) -> None:
        # A release store, because ``version`` is read without the lock.
        store(self._words, _VERSION, int(self._words[_VERSION]) + 1)

    def _origins(self, compact: bool) -> Iterator[tuple[int, int, int]]:
        """Yield each range, and the vector index that element 0 of a gradient corresponds to."""
        before = 0
        for lo, hi in self.ranges:
            yield lo, hi, lo - before if compact else 0
            before += hi - lo

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the shard's lock."""
        self._waiting.until(lambda spins: acquire(self._words, _LOCK, spins))
        try:
            yield
        finally:
            release(self._words, _LOCK)


class LocalShard:
    """A shard on the worker's node.

    ``remote.RemoteShard`` has the same methods. ``read`` and ``apply`` return functions that wait for the result, so
    that several servers can work at once.

    Args:
        params: The worker's parameters, shape (layout.size,).
        waiting: How to wait for a version.
    """

    def __init__(self, shard: Shard, params: Array, waiting: Backoff) -> None:
        self._shard, self.ranges, self._params, self._waiting = shard, shard.ranges, params, waiting

    def read(self, least: int) -> Callable[[], int]:
        """Copy the newest parameters, of at least version ``least``, to the worker's parameters.

        Returns:
            A function that waits for them, and returns their version.
        """
        self.await_version(least)
        version = self._shard.read(self._params)
        return lambda: version

    def read_vector(self, name: str, out: Array) -> None:
        """Copy the ranges of one of the vectors to ``out``, shape (layout.size,)."""
        self._shard.read(out, name)

    def freeze(self, frozen: Array) -> None:
        """Set which entries do not change from now on; see ``TrainingState.frozen``."""
        self._shard.frozen[:] = frozen

    @span("update")
    def apply(self, grads: Array, push: Push) -> Callable[[], int]:
        """Apply a gradient, shape (layout.size,); return a function that waits for this, and returns its staleness."""
        staleness = self._shard.apply(grads, push)
        return lambda: staleness

    def await_version(self, least: int) -> None:
        """Wait until the parameters have at least this version."""
        if self._shard.version < least:
            self._waiting.until(lambda spins: self._shard.version >= least)
