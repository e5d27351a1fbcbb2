"""Batches of a dataset that processes of this rank load ahead."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.multiprocessing  # lets tensors pass in shared memory

from ..core.layout import Array
from ..data.batch import Batch, ReadAhead
from ..errors import DataError
from .random_numbers import LOOP_STREAM, seed_all

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # for the rank, which then ends its processes

Request = tuple[int, int, bool]  # first position, number of examples, whether they are in the dataset's order


class Collates(Protocol):
    """A split whose batches processes can load."""

    source: str

    def __len__(self) -> int: ...

    def order(self, position: int, count: int, seed: int) -> Array: ...

    def collate(self, indices: Array, seed: int, position: int) -> Batch: ...


class ProcessLoader:
    """Makes the batches of a dataset in processes; see ``data.BatchSource``.

    They are forked at the first batch, and so have the dataset without a copy. A request is taken to be followed by
    others at the same distance as from the one before, which are loaded ahead. A batch has the same bits, whoever
    loads it.

    Args:
        split: The dataset.
        seed: Determines the order, and the random numbers of each batch.
        read_ahead: How many processes load how many batches.
    """

    def __init__(self, split: Collates, seed: int, read_ahead: ReadAhead) -> None:
        self._split, self._seed, self._read_ahead = split, seed, read_ahead
        self._pool: ProcessPoolExecutor | None = None
        self._loading: dict[Request, Future[Batch]] = {}
        self._last: Request | None = None

    def __len__(self) -> int:
        return len(self._split)

    def batch(self, position: int, count: int) -> Batch:
        made = self._load((position, count, False))
        seed_all(self._seed, position, LOOP_STREAM)
        return made

    def sequential(self, start: int, stop: int) -> Batch:
        return self._load((start, stop - start, True))

    def close(self) -> None:
        """End the processes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            processes = list(pool._processes.values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
            for process in processes:
                process.join()

    def _load(self, request: Request) -> Batch:
        """Return a batch, and load those ahead that are expected next.

        Raises:
            DataError: An example cannot be loaded, or a process has died.
        """
        expected = self._expected(request)
        for other in self._loading.keys() - {request, *expected}:
            self._loading.pop(other).cancel()
        try:
            for each in (request, *expected):
                if each not in self._loading:
                    self._loading[each] = self._submit(each)
            return self._loading.pop(request).result()
        except BrokenProcessPool as error:
            raise DataError(
                f"a process that loads examples of {self._split.source} has died: it was killed, as the kernel does "
                "when memory is short, or it has crashed"
            ) from error

    def _expected(self, request: Request) -> list[Request]:
        """Return the requests that follow this one, as far as it follows the last one."""
        (position, count, in_order), last, self._last = request, self._last, request
        distance = 0 if last is None or last[1:] != request[1:] else position - last[0]
        if distance <= 0:
            return []
        number = self._read_ahead.workers * self._read_ahead.prefetch
        following = [(position + distance * (index + 1), count, in_order) for index in range(number)]
        return [each for each in following if not in_order or each[0] + count <= len(self._split)]

    def _submit(self, request: Request) -> Future[Batch]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._read_ahead.workers,
                multiprocessing.get_context("fork"),
                partial(_begin, self._split.collate, os.getpid()),
            )
        position, count, in_order = request
        indices = np.arange(position, position + count) if in_order else self._split.order(position, count, self._seed)
        return self._pool.submit(_collate, indices, self._seed, position)


_collate_in_process: Callable[[Array, int, int], Batch]  # in a process that loads batches


def _begin(collate: Callable[[Array, int, int], Batch], rank_process: int) -> None:
    """Prepare a process: it ends with its rank, and by nothing else."""
    global _collate_in_process
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank_process:  # it has died before
        os._exit(1)
    torch.set_num_threads(1)
    _collate_in_process = collate


def _collate(indices: Array, seed: int, position: int) -> Batch:
    return _collate_in_process(indices, seed, position)
