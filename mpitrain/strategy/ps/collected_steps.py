"""The step coordinator of ``backup``, and the memory for the gradients of a node (``StepGradients``).

A step uses the gradients that arrive first. It has one *place* for each of these gradients. A worker whose gradient is
complete requests a place. If all places are taken, the worker drops its gradient. If all workers and servers share one
node, the workers with a place also update the parameters. The step is done when all these workers have updated their
ranges. On several nodes, the servers update.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...comm.atomics import WORDS, load, lock, release, store
from ...comm.backoff import Backoff
from ...comm.shared_memory import SharedArrays
from ...core.kernels import kernel
from ...core.layout import Array, row_stride
from .coordinator import (
    CLOCK,
    DROPPED,
    HEAD,
    LOCK,
    MODE_WORDS,
    NEXT,
    PAUSE_STEP,
    READS,
    ROW,
    WAIT,
    Assignment,
    CoordinatorMemory,
    close_step,
    count_gradient,
    pause_or_end,
)

NO_PLACE = -1  # the step already has all its gradients

# The step whose gradients are collected, and the number of places taken. On one node also the number of workers with a
# place that have computed their sums, and the number that have updated.
_STEP, _TAKEN, _SUMMED, _UPDATED = range(MODE_WORDS, MODE_WORDS + 4)
_WORKER, _ITEM, _SHARE = range(3)  # columns of a place
_PLACE = 4  # words of a place
_MARKED, _MARKED_ITEM, _MARKED_LOSS = range(3)  # columns of a row of ``StepGradients``


@kernel
def _next_item(words: Array, worker: int, places: int, on_one_node: bool) -> tuple[int, int]:
    """Return item and step of an ``Assignment``."""
    lock(words, LOCK)
    step = words[_STEP]
    item = pause_or_end(words, worker, step)
    is_full = on_one_node and words[_TAKEN] == places  # the step is being applied
    if item == WAIT and step < words[PAUSE_STEP] and not is_full:
        item = words[NEXT]
        words[NEXT] += 1
    release(words, LOCK)
    return item, step


@kernel
def _admit(
    words: Array,
    worker: int,
    item: int,
    step: int,
    loss: float,
    reads: int,
    workers: int,
    places: int,
    on_one_node: bool,
) -> int:
    lock(words, LOCK)
    row = words[HEAD + worker * ROW : HEAD + (worker + 1) * ROW]
    row[CLOCK] += 1
    row[READS] += reads
    place = NO_PLACE
    if words[_STEP] != step or words[_TAKEN] == places:
        row[DROPPED] += 1
    else:
        place = words[_TAKEN]
        at = HEAD + workers * ROW + place * _PLACE
        words[at + _WORKER], words[at + _ITEM] = worker, item
        share = words[at + _SHARE : at + _SHARE + 1].view(np.float64)
        share[0] = loss
        count_gradient(row, 0)
        if place + 1 == places and not on_one_node:
            words[_TAKEN] = 0
            store(words, _STEP, step + 1)
        else:
            store(words, _TAKEN, place + 1)  # workers that wait for the others read this word without the lock
    release(words, LOCK)
    return place  # type: ignore[no-any-return]


@kernel
def _add_one(words: Array, at: int) -> None:
    lock(words, LOCK)
    store(words, at, words[at] + 1)
    release(words, LOCK)


@kernel
def _close_on_one_node(words: Array, step: int, places: int, loss: float, skipped: bool) -> None:
    lock(words, LOCK)
    words[_UPDATED] += 1
    if words[_UPDATED] == places:
        words[_TAKEN] = words[_SUMMED] = words[_UPDATED] = 0
        close_step(words, loss, skipped)
        store(words, _STEP, step + 1)
    release(words, LOCK)


@kernel
def _at_least(words: Array, at: int, value: int, spins: int) -> bool:
    for _ in range(spins):
        if load(words, at) >= value:
            return True
    return False


class CollectedSteps(CoordinatorMemory):
    """See ``CoordinatorMemory``.

    Args:
        places: The number of gradients of a step.
        on_one_node: Whether the workers of a step update the parameters themselves. The step is complete when all of
            them have updated their ranges.
    """

    def __init__(self, shared: SharedArrays, workers: int, places: int, on_one_node: bool = False) -> None:
        super().__init__(shared, workers, mode_words=workers * _PLACE)
        self._places, self._on_one_node = places, on_one_node

    def open(self, step: int, end: int, pause_step: int) -> None:
        super().open(step, end, pause_step)
        self._words[_STEP] = step

    def next(self, worker: int) -> Assignment:
        return Assignment(*_next_item(self._words, worker, self._places, self._on_one_node), lead=0)

    def admit(self, worker: int, item: int, step: int, loss: float, reads: int) -> int:
        """Return a gradient's place in its step; ``NO_PLACE`` if it comes too late."""
        return _admit(self._words, worker, item, step, loss, reads, self._workers, self._places, self._on_one_node)

    def step_done(self, loss: float, skipped: bool) -> None:
        """Count a step; called by the first server when it has applied the step."""
        with self._locked():
            close_step(self._words, loss, skipped)

    def wait_for_gradients(self, waiting: Backoff) -> tuple[Array, float]:
        """On one node: wait until the step has all its gradients.

        Returns:
            The workers with a place, in the order of their work items, shape (places,), and the sum of their losses.
        """
        waiting.until(lambda spins: _at_least(self._words, _TAKEN, self._places, spins))
        start = HEAD + self._workers * ROW
        places = self._words[start : start + self._places * _PLACE].reshape(self._places, _PLACE)
        order = np.argsort(places[:, _ITEM])
        return places[order, _WORKER], sum(places[order, _SHARE].view(np.float64).tolist())

    def wait_for_sums(self, waiting: Backoff) -> None:
        """On one node: mark this rank's partial sums as ready, and wait for the other ranks' sums."""
        _add_one(self._words, _SUMMED)
        waiting.until(lambda spins: _at_least(self._words, _SUMMED, self._places, spins))

    def close_step(self, step: int, loss: float, skipped: bool, waiting: Backoff) -> None:
        """On one node: mark this rank's range as updated; return when the step is done."""
        _close_on_one_node(self._words, step, self._places, loss, skipped)
        waiting.until(lambda spins: _at_least(self._words, _STEP, step + 1, spins))

    def _next_step(self) -> int:
        return int(self._words[_STEP])

    def _earliest_end(self) -> int:
        return int(self._words[_STEP]) + 1  # workers may have begun gradients of this step


class StepGradients:
    """The gradients of a node's ranks, in memory that its servers and workers share.

    Construction is collective over the node; one rank then calls ``open``. The other methods are local.

    Args:
        n_sums: The number of partial sums that each rank computes for norms; see ``Updater.prepare``.

    Attributes:
        rows: Shape (ranks, size or more).
        sums: Shape (ranks, n_sums), float64.
    """

    def __init__(self, shared: SharedArrays, size: int, dtype: np.dtype[Any], n_sums: int) -> None:
        ranks = shared.node.size
        self._rank = shared.node.rank
        self.rows = shared.allocate((ranks, row_stride(size)), dtype)
        self.sums = shared.allocate((ranks, n_sums), np.float64)
        self._marks = shared.allocate((ranks, WORDS), np.int64)
        self._size = size

    def open(self) -> None:
        """Begin without gradients."""
        self._marks[:] = 0

    @property
    def own(self) -> Array:
        """The gradient of this rank, shape (size,)."""
        return self.rows[self._rank, : self._size]

    def mark(self, item: int, step: int, loss: float) -> None:
        """Mark the gradient of this rank as complete for ``step``; it must not change until the step is applied."""
        words = self._marks[self._rank]
        words[_MARKED_ITEM] = item
        words.view(np.float64)[_MARKED_LOSS] = loss
        store(words, _MARKED, step + 1)

    def marked(self, step: int) -> list[tuple[int, float, Array]]:
        """Return work item, loss and gradient of the ranks that have a gradient for ``step``."""
        return [
            (int(words[_MARKED_ITEM]), float(words.view(np.float64)[_MARKED_LOSS]), row[: self._size])
            for words, row in zip(self._marks, self.rows, strict=True)
            if load(words, _MARKED) == step + 1
        ]
