"""Batches that processes of this rank load ahead."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, NamedTuple

from ..core.layout import Array
from ..errors import DataError
from .batch import Batch, Loading
from .dataset_loader import DatasetLoader, LoadsBatches, Request
from .shared_buffers import SharedBuffers

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # for the rank, which then ends its processes
_LEAST_SHARED_BYTES = 1 << 16  # smaller batches pass through the pipe


class _Loaded(NamedTuple):
    """A batch on its way from a process to the rank.

    Attributes:
        pickled: The batch without its arrays.
        arrays: The arrays' bytes; empty if they are in a shared buffer, or part of ``pickled``.
        ranges: Where the arrays are in the shared buffer.
    """

    pickled: bytes
    arrays: list[bytes]
    ranges: list[tuple[int, int]]


class _Submitted(NamedTuple):
    """A batch that a process loads.

    Attributes:
        future: The batch.
        buffer: The shared buffer for its arrays; None if none was free.
        indices: Of its examples.
    """

    future: Future[_Loaded]
    buffer: int | None
    indices: Array


class ProcessLoader(DatasetLoader):
    """Makes batches in processes; see ``data.BatchSource``.

    The processes are forked by the constructor, before the rank has threads that may hold locks, and share the
    dataset's memory. The loader predicts the next requests from the distance between the last two, and loads them
    ahead. The result does not depend on which process loads a batch.

    The arrays of a batch are in shared memory, which is used again when the last object that refers to them has ended.
    A rank that keeps batches receives the next ones through a pipe.
    """

    def __init__(self, split: LoadsBatches, seed: int, loading: Loading) -> None:
        super().__init__(split, seed, loading)
        context = multiprocessing.get_context("fork")
        # Also for the present batch and the last one.
        self._buffers = SharedBuffers(loading.workers * loading.prefetch + 2)
        arguments = split, self._buffers, loading, context.Value("i"), os.getpid()
        self._pool: ProcessPoolExecutor | None = ProcessPoolExecutor(loading.workers, context, _begin, arguments)
        self._pool.submit(os.getpid)  # starts all processes
        self._loading_ahead: dict[Request, _Submitted] = {}
        self._last: Request | None = None

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
            self._buffers.close()

    def _load(self, request: Request) -> tuple[Batch, Array]:
        """Return a batch and the indices of its examples, and load those ahead that are expected next.

        Raises:
            DataError: An example cannot be loaded, or a process has died.
        """
        expected = self._expected(request)
        for other in self._loading_ahead.keys() - {request, *expected}:
            self._abandon(other)
        try:
            for wanted in (request, *expected):
                if wanted not in self._loading_ahead:
                    self._loading_ahead[wanted] = self._submit(wanted)
            future, buffer, indices = self._loading_ahead.pop(request)
            return self._received(future.result(), buffer), indices
        except BrokenProcessPool as error:
            raise DataError(
                f"a process that loads examples of {self._split.source} has died: it was killed, as the kernel does "
                "when memory is short, or it has crashed"
            ) from error

    def _expected(self, request: Request) -> list[Request]:
        """Return the predicted next requests; none if this one does not follow the last."""
        last, self._last = self._last, request
        number = self._loading.workers * self._loading.prefetch
        position, length, end = request
        if end is not None:
            starts = range(position + length, end, length)[:number]
            return [Request(start, min(length, end - start), end) for start in starts]
        distance = 0 if last is None or last[1:] != request[1:] else position - last.position
        return [Request(position + distance * (i + 1), length) for i in range(number)] if distance > 0 else []

    def _submit(self, request: Request) -> _Submitted:
        assert self._pool is not None  # until ``close``
        buffer, indices = self._buffers.take(), self._indices(request)
        return _Submitted(self._pool.submit(_load, indices, self._seed, request.position, buffer), buffer, indices)

    def _abandon(self, request: Request) -> None:
        future, buffer, _ = self._loading_ahead.pop(request)
        future.cancel()
        if buffer is not None:
            give_back = partial(self._buffers.give_back, buffer)
            future.add_done_callback(lambda _: give_back())  # until then a process may be writing to the buffer

    def _received(self, loaded: _Loaded, buffer: int | None) -> Batch:
        if loaded.ranges:
            assert buffer is not None
            arrays = self._buffers.view(buffer, loaded.ranges)
            return pickle.loads(loaded.pickled, buffers=arrays)
        if buffer is not None:
            self._buffers.give_back(buffer)
        return pickle.loads(loaded.pickled, buffers=[bytearray(array) for array in loaded.arrays])


_split: LoadsBatches  # in a process that loads batches
_buffers: SharedBuffers


def _begin(split: LoadsBatches, buffers: SharedBuffers, loading: Loading, started: Any, rank_process: int) -> None:
    """Prepare a process: ignore the signals that stop a run, and exit when the rank ends.

    Args:
        started: Shared number of the processes that have started before.
    """
    global _split, _buffers
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank_process:  # it has died before
        os._exit(1)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    _split, _buffers = split, buffers
    with started.get_lock():
        number, started.value = started.value, started.value + 1
    split.start(loading.share * loading.workers + number, loading.shares * loading.workers, is_forked=True)


def _load(indices: Array, seed: int, position: int, buffer: int | None) -> _Loaded:
    """Load a batch in this process.

    Raises:
        DataError: It cannot be loaded, or cannot be sent to the rank.
    """
    arrays: list[pickle.PickleBuffer] = []
    try:
        pickled = pickle.dumps(_split.load(indices, seed, position), protocol=5, buffer_callback=arrays.append)
    except DataError:
        raise
    except BaseException as error:  # SystemExit, too: it would end the rank
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise DataError(f"a batch of {_split.source} cannot be loaded by a process: {why}") from error
    if buffer is None or sum(array.raw().nbytes for array in arrays) < _LEAST_SHARED_BYTES:
        return _Loaded(pickled, [bytes(array.raw()) for array in arrays], [])
    return _Loaded(pickled, [], _buffers.write(buffer, arrays))
