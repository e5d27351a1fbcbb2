"""The step coordinator: work items, pauses, steps and worker statistics of modes with servers.

A *work item* is one batch for one worker; its number determines the examples. One counter assigns the numbers, so an
epoch contains each example once, however fast each worker is. No work item is assigned at or beyond the *pause step*
until that is moved. When all assigned items are finished, the parameters are those of exactly that step; then every
worker receives ``PAUSE``, once.

The state is in shared memory on the node of the first server (``CoordinatorMemory``), changed under one lock. The
operations of every step are compiled, and take a fraction of a microsecond. Workers use it as a ``StepCoordinator``:
in place (``LocalCoordinator``), or by requests to that server (``remote.RemoteCoordinator``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np

from ...comm.atomics import WORDS, load, lock, release, store
from ...comm.backoff import Backoff
from ...comm.shared_memory import SharedArrays
from ...core.kernels import kernel
from ...core.layout import Array
from ...monitor.worker_stats import WorkerStats

END = -1  # no work item: training is over
WAIT = -2  # no work item yet
PAUSE = -3  # no work item yet: all assigned ones are finished, and all workers pause
DROPPED = -1  # instead of a place in the step: the step already has its gradients

BINS = 32  # of the staleness histogram; the last one also counts all higher values

_LOCK = 0
_NEXT, _DONE, _PAUSE_STEP, _END, _STEP, _ARRIVED, _SUMMED, _UPDATED, _LOSS, _SKIPPED = range(WORDS, WORDS + 10)
_POINT = WORDS + 10  # the step at which workers receive PAUSE, or -1
_HEAD = 2 * WORDS
# Offsets in a worker's row; the last one is the step at which it last received PAUSE.
_CLOCK, _STEPS, _DROPPED, _STALE_SUM, _STALE_MAX, _READS, _PAUSED = range(7)
_HISTOGRAM = WORDS
_ROW = _HISTOGRAM + BINS
_ENDED = 1 << 62  # the clock of a worker that has ended: no worker waits for it
_ROW_DTYPE = np.dtype(
    {
        "names": ["steps", "dropped", "staleness_sum", "staleness_max", "reads", "histogram"],
        "formats": ["i8"] * 5 + [("i8", (BINS,))],
        "offsets": [8 * at for at in (_STEPS, _DROPPED, _STALE_SUM, _STALE_MAX, _READS, _HISTOGRAM)],
        "itemsize": 8 * _ROW,
    }
)
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


class Assignment(NamedTuple):
    """What a worker does next.

    Attributes:
        item: Number of the work item; ``WAIT``, ``PAUSE`` or ``END`` if there is none.
        step: The step that the item is for.
        lead: How many steps the worker is ahead of the slowest.
    """

    item: int
    step: int
    lead: int


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


# A ``CoordinatorState`` without the statistics, as a message.
STATE = np.dtype([("done", "i8"), ("begun", "i8"), ("items", "i8"), ("loss", "f8"), ("skipped", "i8")])
STATS_WORDS = _ROW


class StepCoordinator(Protocol):
    """The step coordinator as one worker uses it. Local, or one request to the first server."""

    def next(self) -> Assignment:
        """Return a work item, a pause, or the end; waits until there is one of them."""

    def finish(self, loss: float, staleness: int, reads: int, skipped: bool) -> int:
        """Count a gradient that was applied by all shards, or skipped; return the number of steps done."""

    def admit(self, item: int, step: int, loss: float, reads: int) -> int:
        """backup: return this gradient's place among those of its step; ``DROPPED`` if it comes too late."""

    def set_pause_step(self, step: int) -> None:
        """Assign work items only for steps before ``step``; begun steps are still completed."""

    def request_pause(self) -> None:
        """Assign no further work items, except those that a begun step needs, until the pause step is moved."""

    def stop(self) -> None:
        """End training as soon as the begun steps are completed."""

    def state(self) -> CoordinatorState:
        """Return the progress of training, and the statistics of each worker since this run began."""


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
    """Return the fields of an ``Assignment``."""
    lock(words, _LOCK)
    counted, row, pause_step = _counted(words, gradients_per_step), _HEAD + worker * _ROW, words[_PAUSE_STEP]
    item, lead = WAIT, 0
    if words[_DONE] == pause_step and pause_step < words[_END] and words[_POINT] != pause_step:
        words[_POINT] = pause_step
    # Once a worker has received PAUSE, all do.
    if words[_POINT] == pause_step and words[row + _PAUSED] != pause_step:
        words[row + _PAUSED] = pause_step
        item = PAUSE
    elif counted >= words[_END]:
        words[row + _CLOCK] = _ENDED
        item = END
    elif counted < pause_step and not (on_one_node and words[_ARRIVED] == gradients_per_step):
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


class CoordinatorMemory:
    """The state of the step coordinator in shared memory. Every method is local, and any rank of the node may call it.

    Construction is collective over the node. One rank calls ``open`` before any other method.

    Args:
        shared: The shared memory of its node.
        rules: How to assign work items.
    """

    def __init__(self, shared: SharedArrays, rules: CoordinatorRules) -> None:
        self.rules = rules
        self._words = shared.allocate((_HEAD + rules.workers * (_ROW + _PLACE),), np.int64)

    def open(self, step: int, end: int, pause_step: int) -> None:
        """Begin at ``step``, end at ``end``, and pause first at ``pause_step``; called by one rank."""
        words = self._words
        words[:] = 0
        words[_STEP], words[_DONE], words[_PAUSE_STEP], words[_END], words[_POINT] = step, step, pause_step, end, -1
        words[_NEXT] = step if not self.rules.gradients_per_step else 0
        words[_HEAD : _HEAD + self.rules.workers * _ROW].reshape(-1, _ROW)[:, _PAUSED] = -1

    def next(self, worker: int) -> Assignment:
        """Return a work item for a worker; ``WAIT`` if there is none yet."""
        r = self.rules
        return Assignment(*_next_item(self._words, worker, r.workers, r.bound, r.gradients_per_step, r.on_one_node))

    def finish(self, worker: int, loss: float, staleness: int, reads: int, skipped: bool = False) -> int:
        """See ``StepCoordinator``."""
        return _finish(self._words, worker, loss, staleness, reads, skipped)

    def admit(self, worker: int, item: int, step: int, loss: float, reads: int) -> int:
        """See ``StepCoordinator``."""
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

    def step_done(self, loss: float, skipped: bool) -> None:
        """backup, with servers: count a step; called by the first server when it has applied the step."""
        with self._locked():
            _close(self._words, loss, skipped)

    def set_pause_step(self, step: int) -> None:
        """See ``StepCoordinator``."""
        with self._locked():
            self._words[_PAUSE_STEP] = max(step, self._begun())

    def request_pause(self) -> None:
        """See ``StepCoordinator``."""
        with self._locked():
            earliest = max(self._begun(), self._words[_POINT] + 1)
            self._words[_PAUSE_STEP] = min(self._words[_PAUSE_STEP], earliest)

    def stop(self) -> None:
        """See ``StepCoordinator``."""
        with self._locked():
            # At a pause: after one more step, so that workers do not reach the same point twice.
            self._words[_END] = min(self._words[_END], max(self._begun(), self._words[_POINT] + 1))

    def _begun(self) -> int:
        """Return the step after the last one that work items were assigned for."""
        return _counted(self._words, self.rules.gradients_per_step) + (1 if self.rules.gradients_per_step else 0)

    def state(self) -> CoordinatorState:
        """Return the progress of training."""
        return unpack_state(*self.raw_state())

    def raw_state(self) -> tuple[Array, Array]:
        """Return a ``CoordinatorState`` for sending: a ``STATE``, and the words of the worker statistics, int64."""
        count, words = self.rules.workers, self._words
        with self._locked():
            begun, loss = _counted(words, self.rules.gradients_per_step), words[_LOSS : _LOSS + 1].view(np.float64)[0]
            state = np.array((words[_DONE], begun, words[_NEXT], loss, words[_SKIPPED]), STATE)
            return state, words[_HEAD : _HEAD + count * _ROW].copy()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock(self._words, _LOCK)
        try:
            yield
        finally:
            release(self._words, _LOCK)


class LocalCoordinator:
    """The step coordinator of a worker on its node; see ``StepCoordinator``.

    Args:
        worker: Index of the worker.
        waiting: How it waits for a work item.
    """

    def __init__(self, memory: CoordinatorMemory, worker: int, waiting: Backoff) -> None:
        self._memory, self._worker, self._waiting = memory, worker, waiting
        self.set_pause_step, self.request_pause, self.stop = memory.set_pause_step, memory.request_pause, memory.stop
        self.state = memory.state

    def next(self) -> Assignment:
        assignment = self._memory.next(self._worker)
        if assignment.item == WAIT:
            self._waiting.until(self._poll)
            assignment = self._polled
        return assignment

    def finish(self, loss: float, staleness: int, reads: int, skipped: bool) -> int:
        return self._memory.finish(self._worker, loss, staleness, reads, skipped)

    def admit(self, item: int, step: int, loss: float, reads: int) -> int:
        return self._memory.admit(self._worker, item, step, loss, reads)

    def _poll(self, spins: int) -> bool:
        self._polled = self._memory.next(self._worker)
        return self._polled.item != WAIT


def unpack_state(state: Array, rows: Array) -> CoordinatorState:
    """Return the state that ``CoordinatorMemory.raw_state`` has packed."""
    done, begun, items, loss, skipped = state.tolist()
    workers = [WorkerStats._make((*row[:-1], tuple(row[-1].tolist()))) for row in rows.view(_ROW_DTYPE).tolist()]
    return CoordinatorState(done, begun, items, loss, skipped, workers)
