"""The step coordinator: work items, pauses, steps and worker statistics of modes with servers.

A *work item* is one batch for one worker; its number determines the examples. One counter assigns the numbers, from the
step at which the run begins. An epoch therefore contains each example once, regardless of the workers' speeds. No work
item is assigned for the *pause step* or later until the pause step is moved. When all assigned items are finished, the
parameters belong to exactly the pause step; then every worker receives ``PAUSE``, once.

The state is int64 words in shared memory on the node of the first server (``CoordinatorMemory``)::

    word   0                LOCK
    word  16 = WORDS        NEXT  DONE  PAUSE_STEP  END_STEP  LOSS  SKIPPED  POINT  | four words of the mode
    word  32 = HEAD         worker 0: CLOCK  STEPS  DROPPED  STALE_SUM  STALE_MAX  READS  PAUSED  ...  | histogram
    word  32 + ROW          worker 1
    ...
    word  32 + workers ROW  further words of the mode: in backup, the gradients of the step that is being collected

Words are changed only under the lock, so an operation never reads another operation's partial changes. Words that ranks
wait for are also read without the lock. They are therefore stored last, with release order. A rank that reads these
words with acquire order also reads the values that were written before. Losses are float64 in the same words.

The operations of every step are compiled, and take a fraction of a microsecond. How items are assigned, and when a step
is done, depends on the mode: ``counted_steps`` for ``async`` and ``ssp``, ``collected_steps`` for ``backup``. Workers
on other nodes send requests to the first server, which makes the calls (``remote.RemoteCoordinator``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from ...comm.atomics import WORDS, lock, release
from ...comm.shared_memory import SharedArrays
from ...core.kernels import kernel
from ...core.layout import Array
from ...monitor.worker_stats import WorkerStats

END = -1  # no work item: training is over
WAIT = -2  # no work item yet
PAUSE = -3  # no work item yet: all assigned ones are finished, and all workers pause

BINS = 32  # bins of the staleness histogram; the last one also counts all higher values

LOCK = 0
NEXT, DONE, PAUSE_STEP, END_STEP, LOSS, SKIPPED = range(WORDS, WORDS + 6)
POINT = WORDS + 6  # the step at which workers receive PAUSE, or -1
MODE_WORDS = WORDS + 7
HEAD = 2 * WORDS
# Offsets in a worker's row; the last one is the step at which the worker last received PAUSE.
CLOCK, STEPS, DROPPED, STALE_SUM, STALE_MAX, READS, PAUSED = range(7)
HISTOGRAM = WORDS
ROW = HISTOGRAM + BINS
_ENDED = 1 << 62  # the clock of a worker that has ended: no worker waits for it
_ROW_DTYPE = np.dtype(
    {
        "names": ["steps", "dropped", "staleness_sum", "staleness_max", "reads", "histogram"],
        "formats": ["i8"] * 5 + [("i8", (BINS,))],
        "offsets": [8 * at for at in (STEPS, DROPPED, STALE_SUM, STALE_MAX, READS, HISTOGRAM)],
        "itemsize": 8 * ROW,
    }
)


class Assignment(NamedTuple):
    """The next action of a worker.

    Attributes:
        item: Number of the work item; ``WAIT``, ``PAUSE`` or ``END`` if there is none.
        step: The step that the item is for.
        lead: How many steps the worker is ahead of the slowest worker, in modes in which each gradient is a step.
    """

    item: int
    step: int
    lead: int


class CoordinatorState(NamedTuple):
    """The progress of training.

    Attributes:
        done: Number of applied steps, including those before a resume.
        begun: The step of the next work item; equal to ``done`` when all earlier steps are applied.
        items: The number of the next work item; the first number of a run is its first step.
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
STATS_WORDS = ROW


@kernel
def pause_or_end(words: Array, worker: int, step: int) -> int:
    """Return ``PAUSE`` or ``END`` if the worker receives it now, else ``WAIT``. The caller holds the lock.

    Args:
        step: The step of the next work item.
    """
    row, pause_step = HEAD + worker * ROW, words[PAUSE_STEP]
    if words[DONE] == pause_step and pause_step < words[END_STEP] and words[POINT] != pause_step:
        words[POINT] = pause_step
    # Once a worker has received PAUSE, all do.
    if words[POINT] == pause_step and words[row + PAUSED] != pause_step:
        words[row + PAUSED] = pause_step
        return PAUSE
    if step >= words[END_STEP]:
        words[row + CLOCK] = _ENDED
        return END
    return WAIT


@kernel
def close_step(words: Array, loss: float, skipped: bool) -> None:
    """Count one step as done. The caller holds the lock."""
    words[DONE] += 1
    if skipped:
        words[SKIPPED] += 1
    else:
        total = words[LOSS : LOSS + 1].view(np.float64)
        total[0] += loss


@kernel
def count_gradient(row: Array, staleness: int) -> None:
    """Count an applied gradient in its worker's row. The caller holds the lock."""
    row[STEPS] += 1
    row[STALE_SUM] += staleness
    row[STALE_MAX] = max(row[STALE_MAX], staleness)
    row[HISTOGRAM + min(staleness, BINS - 1)] += 1


class CoordinatorMemory(ABC):
    """The state of the step coordinator in shared memory. Every method is local, and any rank of the node may call it.

    Construction is collective over the node. One rank calls ``open`` before any other method.

    Args:
        shared: The shared memory of its node.
        workers: The number of workers.
        mode_words: The number of words that the mode needs in addition.
    """

    def __init__(self, shared: SharedArrays, workers: int, mode_words: int = 0) -> None:
        self._workers = workers
        self._words = shared.allocate((HEAD + workers * ROW + mode_words,), np.int64)

    def open(self, step: int, end: int, pause_step: int) -> None:
        """Begin at ``step``, end at ``end``, and pause first at ``pause_step``; called by one rank."""
        words = self._words
        words[:] = 0
        words[NEXT], words[DONE], words[PAUSE_STEP], words[END_STEP], words[POINT] = step, step, pause_step, end, -1
        words[HEAD : HEAD + self._workers * ROW].reshape(-1, ROW)[:, PAUSED] = -1

    @abstractmethod
    def next(self, worker: int) -> Assignment:
        """Return a work item for a worker, a pause, or the end; ``WAIT`` if there is none of them yet."""

    @abstractmethod
    def _next_step(self) -> int:
        """Return the step of the next work item. The caller holds the lock."""

    @abstractmethod
    def _earliest_end(self) -> int:
        """Return the earliest step at which training can end: no worker has begun it. The caller holds the lock."""

    def set_pause_step(self, step: int) -> None:
        """Assign work items only for steps before ``step``; begun steps are still completed."""
        with self._locked():
            self._words[PAUSE_STEP] = max(step, self._earliest_end())

    def request_pause(self) -> None:
        """Assign no further work items, except those that a begun step needs, until the pause step is moved."""
        with self._locked():
            earliest = max(self._earliest_end(), self._words[POINT] + 1)
            self._words[PAUSE_STEP] = min(self._words[PAUSE_STEP], earliest)

    def stop(self) -> None:
        """End training as soon as the begun steps are completed."""
        with self._locked():
            # At a pause: after one more step, so that workers do not reach the same point twice.
            self._words[END_STEP] = min(self._words[END_STEP], max(self._earliest_end(), self._words[POINT] + 1))

    def state(self) -> CoordinatorState:
        """Return the progress of training, and the statistics of each worker since this run began."""
        return unpack_state(*self.raw_state())

    def raw_state(self) -> tuple[Array, Array]:
        """Return a ``CoordinatorState`` for sending: a ``STATE``, and the words of the worker statistics, int64."""
        words = self._words
        with self._locked():
            loss = words[LOSS : LOSS + 1].view(np.float64)[0]
            state = np.array((words[DONE], self._next_step(), words[NEXT], loss, words[SKIPPED]), STATE)
            return state, words[HEAD : HEAD + self._workers * ROW].copy()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock(self._words, LOCK)
        try:
            yield
        finally:
            release(self._words, LOCK)


def unpack_state(state: Array, rows: Array) -> CoordinatorState:
    """Return the state that ``CoordinatorMemory.raw_state`` has packed."""
    done, begun, items, loss, skipped = state.tolist()
    workers = [WorkerStats._make((*row[:-1], tuple(row[-1].tolist()))) for row in rows.view(_ROW_DTYPE).tolist()]
    return CoordinatorState(done, begun, items, loss, skipped, workers)
