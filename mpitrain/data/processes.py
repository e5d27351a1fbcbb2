"""Batches that processes of this rank load ahead."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import pickle
import select
import signal
import sys
from collections import deque
from itertools import accumulate, cycle, islice
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from ..core.host_memory import keep_freed_memory
from ..core.layout import Array
from ..core.words import one_line
from ..errors import DataError
from .batch import Batch, Loading
from .dataset_loader import DatasetLoader, LoadsBatches, Request, indices_of
from .shared_buffers import SharedBuffers

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # only the rank handles these
_LEAST_SHARED_BYTES = 1 << 16  # smaller batches pass through the pipe


class _Loaded(NamedTuple):
    """A batch, and the indices of its examples, on its way from a process to the rank.

    Attributes:
        pickled: Batch and indices without their arrays; or an exception in place of these.
        arrays: The arrays' bytes; empty if they are in a shared buffer, or part of ``pickled``.
        ranges: Where the arrays are in the shared buffer.
    """

    pickled: bytes
    arrays: list[bytes]
    ranges: list[tuple[int, int]]


class _Submitted:
    """A batch that a process loads.

    Attributes:
        request: The batch.
        buffer: The shared buffer for its arrays; None if none was free.
        loaded: The batch when it has been received.
        is_wanted: Whether the batch will be used.
    """

    def __init__(self, request: Request, buffer: int | None) -> None:
        self.request, self.buffer = request, buffer
        self.loaded: _Loaded | None = None
        self.is_wanted = True


class _Process:
    """A process that loads batches, in the order in which they are submitted.

    A rank never waits to send: requests are small, and the number of requests of a process is limited.
    """

    def __init__(self, context: Any, split: LoadsBatches, seed: int, buffers: SharedBuffers, share: int, shares: int):
        self._connection, other = context.Pipe()
        arguments = other, split, seed, buffers, share, shares, os.getpid()
        self._process = context.Process(target=_serve, args=arguments)
        self._process.start()
        other.close()  # closed here so that the end of the process ends the connection
        self._submitted: deque[_Submitted] = deque()
        self._readable = select.poll()
        self._readable.register(self._connection.fileno(), select.POLLIN)

    @property
    def count(self) -> int:
        """Number of submitted batches that have not been received."""
        return len(self._submitted)

    def submit(self, submitted: _Submitted) -> None:
        self._connection.send((submitted.request, submitted.buffer))
        self._submitted.append(submitted)

    def has_loaded(self) -> bool:
        """Return whether ``receive`` need not wait."""
        return self.count > 0 and bool(self._readable.poll(0))

    def receive(self) -> _Submitted:
        """Return the batch that was submitted first. May wait."""
        submitted = self._submitted[0]
        submitted.loaded = self._connection.recv()
        return self._submitted.popleft()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


class ProcessLoader(DatasetLoader):
    """Makes batches in processes; see ``data.BatchSource``.

    The processes are forked by the constructor, before the rank has threads that may hold locks, and share the
    dataset's memory. The loader predicts the next requests, and loads them ahead: the distances between requests repeat
    with every ``loading.period`` of them. The result does not depend on which process loads a batch.

    The arrays of a batch are in shared memory, which is used again when the last object that refers to them is deleted.
    A rank that keeps batches receives the next batches through a pipe.
    """

    def __init__(self, split: LoadsBatches, seed: int, loading: Loading) -> None:
        super().__init__(split, seed, loading)
        context = multiprocessing.get_context("fork")
        # Two more buffers: for the current batch and the previous batch.
        self._buffers = SharedBuffers(loading.workers * loading.prefetch + 2)
        first, shares = loading.share * loading.workers, loading.shares * loading.workers
        self._processes = [
            _Process(context, split, seed, self._buffers, first + number, shares) for number in range(loading.workers)
        ]
        atexit.register(self.close)  # runs before multiprocessing waits for the processes
        self._loading_ahead: dict[Request, tuple[_Submitted, _Process]] = {}
        self._last: Request | None = None
        self._distances: deque[int] = deque(maxlen=loading.period)  # between the last requests

    def close(self) -> None:
        """End the processes."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
        if processes:
            self._buffers.close()
            atexit.unregister(self.close)

    def _load(self, request: Request) -> tuple[Batch, Array]:
        """Return a batch and the indices of its examples, and begin to load the batches that are expected next.

        Raises:
            DataError: An example cannot be loaded, or a process has died.
        """
        expected = self._expected(request)
        for other in self._loading_ahead.keys() - {request, *expected}:
            dropped, _ = self._loading_ahead.pop(other)
            dropped.is_wanted = False
            if dropped.loaded is not None and dropped.buffer is not None:
                self._buffers.give_back(dropped.buffer)
        try:
            for process in self._processes:
                while process.has_loaded():
                    self._receive(process)
            for wanted in (request, *expected):
                if wanted not in self._loading_ahead:
                    self._submit(wanted)
            submitted, process = self._loading_ahead.pop(request)
            while submitted.loaded is None:
                self._receive(process)
        except (EOFError, OSError) as error:
            raise DataError(
                f"a process that loads examples of {self._split.source} has died: it was killed, as the kernel does "
                "when memory is short, or it has crashed"
            ) from error
        return self._taken(submitted.loaded, submitted.buffer)

    def _expected(self, request: Request) -> list[Request]:
        """Return the predicted next requests; empty if they cannot be predicted."""
        last, self._last = self._last, request
        number = self._loading.workers * self._loading.prefetch
        position, length, end = request
        if end is not None:
            starts = range(position + length, end, length)[:number]
            return [Request(start, min(length, end - start), end) for start in starts]
        is_alike = last is not None and last[1:] == request[1:]
        self._distances.append(position - last.position if last is not None and is_alike else 0)
        if len(self._distances) < self._loading.period or min(self._distances) <= 0:
            return []
        following = islice(accumulate(cycle(self._distances), initial=position), 1, number + 1)
        return [Request(start, length) for start in following]

    def _submit(self, request: Request) -> None:
        """Submit a batch to the process that has the fewest batches to load."""
        process = min(self._processes, key=lambda process: process.count)
        submitted = _Submitted(request, self._buffers.take())
        process.submit(submitted)
        self._loading_ahead[request] = submitted, process

    def _receive(self, process: _Process) -> None:
        """Receive a batch, which is dropped if it is no longer wanted. May wait."""
        submitted = process.receive()
        if not submitted.is_wanted and submitted.buffer is not None:
            self._buffers.give_back(submitted.buffer)

    def _taken(self, loaded: _Loaded, buffer: int | None) -> tuple[Batch, Array]:
        """Return a batch that was received, and the indices of its examples.

        Raises:
            DataError: The batch could not be loaded.
        """
        if loaded.ranges:
            assert buffer is not None
            arrays: Any = self._buffers.view(buffer, loaded.ranges)
        else:
            arrays = map(bytearray, loaded.arrays)
            if buffer is not None:
                self._buffers.give_back(buffer)
        result = pickle.loads(loaded.pickled, buffers=arrays)
        if isinstance(result, Exception):
            raise result
        return result


def _serve(
    connection: Connection,
    split: LoadsBatches,
    seed: int,
    buffers: SharedBuffers,
    share: int,
    shares: int,
    rank_process: int,
) -> None:
    """Load batches in this process until the rank ends it. Signals that stop a run are ignored.

    Args:
        share, shares: Index of this process among those that load examples, and their number.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank_process:  # the rank's process has died already
        os._exit(1)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    keep_freed_memory()
    split.start(share, shares, is_forked=True)
    while True:
        request, buffer = connection.recv()
        connection.send(_loaded(split, request, seed, buffer, buffers))


def _loaded(split: LoadsBatches, request: Request, seed: int, buffer: int | None, buffers: SharedBuffers) -> _Loaded:
    """Load a batch in this process."""
    arrays: list[pickle.PickleBuffer] = []
    try:
        indices = indices_of(split, request, seed)
        writer = None if buffer is None else buffers.writer(buffer)
        batch = split.load(indices, seed, request.position, np.empty if writer is None else writer.allocate)
        pickled = pickle.dumps((batch, indices), protocol=5, buffer_callback=arrays.append)
        if writer is not None and sum(array.raw().nbytes for array in arrays) >= _LEAST_SHARED_BYTES:
            return _Loaded(pickled, [], writer.write(arrays))
        return _Loaded(pickled, [bytes(array.raw()) for array in arrays], [])
    except DataError as error:
        why = str(error)
    except BaseException as error:  # SystemExit, too: the process serves until the rank ends it
        problem = f"{type(error).__name__}: {one_line(error)}"
        why = f"a batch of {split.source} cannot be loaded by a process: {problem}"
    return _Loaded(pickle.dumps(DataError(why)), [], [])
