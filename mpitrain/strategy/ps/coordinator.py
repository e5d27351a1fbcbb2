"""The step coordinator: work items, pause steps, steps and worker statistics of the asynchronous modes.

A *work item* is one batch for one worker; its number determines the examples. One counter assigns the numbers, so an
epoch contains each example once, however fast each worker is. No work item is assigned at or beyond the *pause step*
until that is moved: when all assigned items are finished, the parameters are those of exactly that step.

The state is in shared memory on the node of the first server, changed under one lock. The operations of every step are
compiled, and take a fraction of a microsecond. Workers on other nodes send requests to that server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from ...comm.atomics import WORDS, load, lock, release, store
from ...comm.backoff import Backoff
from ...comm.shared_memory import SharedArrays
from ...core.kernels import kernel
from ...core.layout import Array
from ...monitor.worker_stats import WorkerStats

END = -1  # no work item: training is over
WAIT = -2  # no work item yet
PAUSE = -3  # no work item yet: all workers are paused, and the chief must move the pause step
DROPPED = -1  # instead of a place in the step: the step already has its gradients

BINS = 32  # of the staleness histogram; the last one also counts all higher values

_LOCK = 0
_NEXT, _DONE, _PAUSE_STEP, _END, _STEP, _ARRIVED, _SUMMED, _UPDATED, _LOSS, _SKIPPED = range(WORDS, WORDS + 10)
_HEAD = 2 * WORDS
# Offsets in a worker's row.
_CLOCK, _STEPS, _DROPPED, _STALE_SUM, _STALE_MAX, _READS = range(6)
_HISTOGRAM = WORDS
_ROW = _HISTOGRAM + BINS
_ENDED = 1 << 62  # the clock of a worker that has ended: no worker waits for it
# Offsets in a place of the step that is being collected.
_WORKER, _ITEM, _SHARE = range(3)
_PLACE = 4


class CoordinatorRules(NamedTuple):
    """How a mode assigns work items.

    Attributes:
        workers: The number of workers.
        bound: ssp: how many steps a worker may be ahead of the slowest; -1 for no bound.
        gradients_per_step: backup: the number of gradients of a step; 0 if each gradient is one step.
        on_one_node: backup: the workers of a step update the parameters themselves, and the step counts afterwards.
    """

    workers: int
    bound: int = -1
    gradients_per_step: int = 0
    on_one_node: bool = False


class CoordinatorState(NamedTuple):
    """The progress of training.

    Attributes:
        done: Number of applied steps, including those before a resume.
        begun: Number of steps that work items were assigned for.
        items: Number of assigned work items.
        loss: Sum of the losses of this run's steps that were not skipped.
        skipped: Number of this run's steps that were skipped because their loss was not finite.
        worker_stats: Statistics of each worker.
    """

    done: int
    begun: int
    items: int
    loss: float
    skipped: int
    worker_stats: list[WorkerStats]


@kernel
def _counted(words: Array, gradients_per_step: int) -> int:
    return words[_STEP] if gradients_per_step else words[_NEXT]  # type: ignore[no-any-return]


@kernel
def _slowest(words: Array, workers: int) -> int:
    slowest = _ENDED
    for w in range(workers):
        slowest = min(slowest, words[_HEAD + w * _ROW + _CLOCK])
    return slowest


@kernel
def _next_item(
    words: Array, worker: int, workers: int, bound: int, gradients_per_step: int, on_one_node: bool
) -> tuple[int, int, int]:
    """Return a work item, its step, and the worker's lead over the slowest worker; the item may be END or WAIT."""
    lock(words, _LOCK)
    counted, row = _counted(words, gradients_per_step), _HEAD + worker * _ROW
    item, lead = WAIT, 0
    if counted >= words[_END]:
        words[row + _CLOCK] = _ENDED
        item = END
    elif counted < words[_PAUSE_STEP] and not (on_one_node and words[_ARRIVED] == gradients_per_step):
        lead = words[row + _CLOCK] - _slowest(words, workers)
        if bound < 0 or lead <= bound:
            item = words[_NEXT]
            words[_NEXT] += 1
    release(words, _LOCK)
    return item, counted, lead


@kernel
def _finish(words: Array, worker: int, loss: float, staleness: int, reads: int, skipped: bool) -> int:
    lock(words, _LOCK)
    row = words[_HEAD + worker * _ROW : _HEAD + (worker + 1) * _ROW]
    row[_READS] += reads
    if not skipped:
        _count(row, staleness)
    row[_CLOCK] += 1
    _close(words, loss, skipped)
    done = words[_DONE]
    release(words, _LOCK)
    return done  # type: ignore[no-any-return]


@kernel
def _close(words: Array, loss: float, skipped: bool) -> None:
    """Count one step as done."""
    words[_DONE] += 1
    if skipped:
        words[_SKIPPED] += 1
    else:
        total = words[_LOSS : _LOSS + 1].view(np.float64)
        total[0] += loss


@kernel
def _add_one(words: Array, at: int) -> None:
    lock(words, _LOCK)
    store(words, at, words[at] + 1)
    release(words, _LOCK)


@kernel
def _close_step_on_one_node(words: Array, step: int, gradients_per_step: int, loss: float, skipped: bool) -> None:
    lock(words, _LOCK)
    words[_UPDATED] += 1
    if words[_UPDATED] == gradients_per_step:
        words[_ARRIVED] = words[_SUMMED] = words[_UPDATED] = 0
        _close(words, loss, skipped)
        store(words, _STEP, step + 1)
    release(words, _LOCK)


@kernel
def _count(row: Array, staleness: int) -> None:
    row[_STEPS] += 1
    row[_STALE_SUM] += staleness
    row[_STALE_MAX] = max(row[_STALE_MAX], staleness)
    row[_HISTOGRAM + min(staleness, BINS - 1)] += 1


@kernel
def _admit(
    words: Array,
    worker: int,
    item: int,
    step: int,
    loss: float,
    reads: int,
    workers: int,
    gradients_per_step: int,
    on_one_node: bool,
) -> int:
    lock(words, _LOCK)
    row = words[_HEAD + worker * _ROW : _HEAD + (worker + 1) * _ROW]
    row[_CLOCK] += 1
    row[_READS] += reads
    place = DROPPED
    if words[_STEP] != step or words[_ARRIVED] == gradients_per_step:
        row[_DROPPED] += 1
    else:
        place = words[_ARRIVED]
        at = _HEAD + workers * _ROW + place * _PLACE
        words[at + _WORKER], words[at + _ITEM] = worker, item
        share = words[at + _SHARE : at + _SHARE + 1].view(np.float64)
        share[0] = loss
        _count(row, 0)
        if place + 1 == gradients_per_step and not on_one_node:
            words[_ARRIVED] = 0
            store(words, _STEP, step + 1)
        else:
            store(words, _ARRIVED, place + 1)  # read without the lock by workers that wait for the others
    release(words, _LOCK)
    return place  # type: ignore[no-any-return]


@kernel
def _at_least(words: Array, at: int, value: int, spins: int) -> bool:
    for _ in range(spins):
        if load(words, at) >= value:
            return True
    return False


class StepCoordinator:
    """Assigns work items and counts steps. Every method is local, and any rank of the node may call it.

    Construction is collective over the node. One rank calls ``open`` before any other method.

    Args:
        shared: The shared memory of its node.
        rules: How to assign work items.
    """

    def __init__(self, shared: SharedArrays, rules: CoordinatorRules) -> None:
        self.rules = rules
        self._words = shared.allocate((_HEAD + rules.workers * (_ROW + _PLACE),), np.int64)

    def open(self, step: int, end: int) -> None:
        """Begin at ``step``, end at ``end``, with the pause step at the beginning; called by one rank."""
        words = self._words
        words[:] = 0
        words[_STEP], words[_DONE], words[_PAUSE_STEP], words[_END] = step, step, step, end
        words[_NEXT] = step if not self.rules.gradients_per_step else 0

    def next(self, worker: int, chief: bool = False) -> tuple[int, int, int]:
        """Return a work item for a worker: its number, its step, and the worker's lead over the slowest in steps.

        The number is ``WAIT`` if there is none yet, ``PAUSE`` if the chief must move the pause step first, and ``END``
        if there will be none.
        """
        rules = self.rules
        item, step, ahead = _next_item(
            self._words, worker, rules.workers, rules.bound, rules.gradients_per_step, rules.on_one_node
        )
        if chief and item == WAIT and self._paused():
            item = PAUSE
        return item, step, ahead

    def finish(self, worker: int, loss: float, staleness: int, reads: int, skipped: bool = False) -> int:
        """Count a gradient that was applied by all shards, or skipped; return the number of steps done."""
        return _finish(self._words, worker, loss, staleness, reads, skipped)

    def admit(self, worker: int, item: int, step: int, loss: float, reads: int) -> int:
        """backup: return this gradient's place among those of its step; ``DROPPED`` if it comes too late."""
        r = self.rules
        return _admit(self._words, worker, item, step, loss, reads, r.workers, r.gradients_per_step, r.on_one_node)

    def admitted(self) -> tuple[Array, float]:
        """backup, on one node: return the step's workers by work item, shape (gradients_per_step,), and its loss."""
        gradients_per_step = self.rules.gradients_per_step
        start = _HEAD + self.rules.workers * _ROW
        places = self._words[start : start + gradients_per_step * _PLACE].reshape(gradients_per_step, _PLACE)
        order = np.argsort(places[:, _ITEM])
        return places[order, _WORKER], sum(places[order, _SHARE].view(np.float64).tolist())

    def wait_for_gradients(self, waiting: Backoff) -> None:
        """backup, on one node: wait until the step has all its gradients."""
        waiting.until(lambda spins: _at_least(self._words, _ARRIVED, self.rules.gradients_per_step, spins))

    def wait_for_sums(self, waiting: Backoff) -> None:
        """backup, on one node: mark this rank's partial sums as ready, and wait for those of the others."""
        _add_one(self._words, _SUMMED)
        waiting.until(lambda spins: _at_least(self._words, _SUMMED, self.rules.gradients_per_step, spins))

    def close_step(self, step: int, loss: float, skipped: bool, waiting: Backoff) -> None:
        """backup, on one node: mark this rank's range as updated; return when the step is done."""
        words = self._words
        _close_step_on_one_node(words, step, self.rules.gradients_per_step, loss, skipped)
        waiting.until(lambda spins: _at_least(words, _STEP, step + 1, spins))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """backup, on one node: prevent updates of the parameters."""
        while True:
            with self._locked():
                if self._words[_ARRIVED] != self.rules.gradients_per_step:  # otherwise an update is in progress
                    yield
                    return
            os.sched_yield()

    def step_done(self, loss: float, skipped: bool) -> None:
        """backup, with servers: count a step; called by the first server when it has applied the step."""
        with self._locked():
            _close(self._words, loss, skipped)

    def set_pause_step(self, step: int) -> None:
        """Assign work items only for steps before ``step``; begun steps are still completed."""
        with self._locked():
            self._words[_PAUSE_STEP] = max(step, self._begun())

    def stop(self) -> None:
        """Assign no further work items, except those that a begun step needs."""
        with self._locked():
            self._words[_END] = min(self._words[_END], self._begun())

    def _begun(self) -> int:
        """Return the step after the last one that work items were assigned for."""
        return _counted(self._words, self.rules.gradients_per_step) + (1 if self.rules.gradients_per_step else 0)

    def _paused(self) -> bool:
        """Return whether all assigned items are finished, and the next step is not before the pause step."""
        with self._locked():
            words = self._words
            return bool(words[_DONE] == words[_PAUSE_STEP] and words[_PAUSE_STEP] < words[_END])

    def state(self) -> CoordinatorState:
        """Return the progress of training."""
        return unpack_state(*self.raw_state())

    def raw_state(self) -> tuple[Array, Array]:
        """Return a ``CoordinatorState`` for sending: its numbers and the words of its worker statistics, both int64."""
        count, words = self.rules.workers, self._words
        with self._locked():
            begun = _counted(words, self.rules.gradients_per_step)
            numbers = np.array([words[_DONE], begun, words[_NEXT], words[_LOSS], words[_SKIPPED]], np.int64)
            return numbers, words[_HEAD : _HEAD + count * _ROW].copy()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock(self._words, _LOCK)
        try:
            yield
        finally:
            release(self._words, _LOCK)


STATS_WORDS = _ROW


def unpack_state(numbers: Array, rows: Array) -> CoordinatorState:
    """Return the state that ``StepCoordinator.raw_state`` has packed."""
    done, begun, items, _, skipped = numbers.tolist()
    worker_stats = [
        WorkerStats(
            steps=row[_STEPS],
            dropped=row[_DROPPED],
            staleness_sum=row[_STALE_SUM],
            staleness_max=row[_STALE_MAX],
            reads=row[_READS],
            histogram=tuple(row[_HISTOGRAM:]),
        )
        for row in rows.reshape(-1, _ROW).tolist()
    ]
    return CoordinatorState(done, begun, items, float(numbers.view(np.float64)[3]), skipped, worker_stats)
