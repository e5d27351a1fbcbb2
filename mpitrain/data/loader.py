"""Batches of a split, prepared in advance."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from ..core import ops
from ..core.layout import Array
from ..core.ranges import split_batch
from .batch import Batch, IndexBatch
from .checks import check_examples
from .permutation import MIXED_BLOCKS
from .split import Split

# A check of examples in stored form and their labels; the integer is the index of the first example.
Check = Callable[[Array, Array, int], None]
_PART_BYTES = 1 << 20  # minimum number of bytes per thread: copying less takes no longer than starting a thread
_BLOCK_BYTES = 4 << 20  # maximum number of bytes of several batches that are made at once
_FIRST_BATCHES = 2  # number of batches that are made before the split is cached on the device
# Number of cached blocks: for this batch and the next one, which may be in the next group.
_CACHED_BLOCKS = 2 * MIXED_BLOCKS + 1


class InMemory:
    """Examples in memory, possibly shared by several ranks.

    Args:
        examples: Shape ``(n, *split.shape)``.
        labels: Shape ``(n, *split.label_shape)``.
        threads: Number of threads that copy the examples of a large batch.
    """

    def __init__(self, examples: Array, labels: Array, threads: int = 1) -> None:
        self.examples, self.labels = examples, labels
        self._rows = examples.reshape(len(examples), -1)
        self._threads, self._pool = threads, ThreadPoolExecutor(threads, "gather")

    def take(self, indices: Array, scale: float, examples: Array, labels: Array) -> None:
        """Copy the examples of these indices, converted and scaled, and their labels."""
        out = examples.reshape(len(indices), -1)
        threads = min(self._threads, out.nbytes // _PART_BYTES)
        if threads > 1:
            self._copy_in_threads(threads, indices, scale, out)
        else:
            _copy(self._rows, indices, scale, out)
        self.labels.take(indices, axis=0, out=labels, mode="clip")

    def _copy_in_threads(self, threads: int, indices: Array, scale: float, out: Array) -> None:
        """Copy a part of the examples in each thread: one thread cannot use the memory's full bandwidth."""

        def copy(ends: tuple[int, int]) -> None:
            part = slice(*ends)
            _copy(self._rows, indices[part], scale, out[part])

        for _ in self._pool.map(copy, split_batch(len(indices), threads)):  # ``_copy`` releases the GIL
            pass

    def start_in_process(self) -> None:
        """Prepare for use in a forked process, which has none of the threads: copy in the calling thread."""
        self._threads = 1

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()


class Streaming:
    """Examples in a file, read in blocks by a thread that is one batch ahead.

    Args:
        split: The examples; ``split.block`` must not be None.
        check: Called when examples have been read; raises DataError. By default labels are checked.
    """

    def __init__(self, split: Split, check: Check | None = None) -> None:
        assert split.block is not None
        self._split, self._rows = split, split.block
        self._check = check or partial(check_examples, "", split, None, None)
        self._blocks: OrderedDict[int, Future[tuple[Array, Array]]] = OrderedDict()
        self._reader = ThreadPoolExecutor(1, "read ahead")

    def take(self, indices: Array, scale: float, examples: Array, labels: Array) -> None:
        """Copy the examples of these indices, converted and scaled, and their labels.

        Raises:
            DataError: The file cannot be read, or its values are not valid.
        """
        self.expect(indices)
        of_block = indices // self._rows
        for block in np.unique(of_block):
            stored, stored_labels = self._blocks[int(block)].result()
            chosen = np.flatnonzero(of_block == block)
            offsets = indices[chosen] - block * self._rows
            part = np.empty((len(chosen), *examples.shape[1:]), examples.dtype)
            _copy(stored.reshape(len(stored), -1), offsets, scale, part.reshape(len(chosen), -1))
            examples[chosen] = part
            labels[chosen] = stored_labels[offsets]

    def expect(self, indices: Array) -> None:
        """Start reading the blocks of these indices, unless they are cached. Returns immediately."""
        wanted = [int(block) for block in np.unique(indices // self._rows)]
        for block in wanted:
            if block in self._blocks:
                self._blocks.move_to_end(block)
            else:
                self._blocks[block] = self._reader.submit(self._read, block)
        while len(self._blocks) > max(_CACHED_BLOCKS, 2 * len(wanted)):
            self._blocks.popitem(last=False)

    def _read(self, block: int) -> tuple[Array, Array]:
        split = self._split
        start, stop = block * self._rows, min((block + 1) * self._rows, len(split))
        examples = np.empty((stop - start, *split.shape), split.dtype)
        labels = np.empty((stop - start, *split.label_shape), split.label_dtype)
        split.read(start, stop, examples, labels)
        self._check(examples, labels, start)
        return examples, labels

    def start_in_process(self) -> None:
        """Prepare for use in a forked process, which has no thread for reading yet."""
        self._reader, self._blocks = ThreadPoolExecutor(1, "read ahead"), OrderedDict()

    def close(self) -> None:
        """Stop the thread."""
        self._reader.shutdown(wait=True, cancel_futures=True)


#: The source of a ``Loader``'s examples.
Storage = InMemory | Streaming
Memory = Callable[[int], "tuple[Array, Array] | None"]


def own_buffers(count: int) -> None:
    """Return None, so that the loader uses its own memory for a batch."""


class Loader:
    """Makes batches of a split. Local.

    Args:
        storage: Storage of the examples.
        seed: Determines the order of examples.
        dtype: Data type of the examples in a batch; None for the stored type, without scaling.
        memory: Returns arrays for the next batch, given its size; or None to use the loader's memory.
        stride: Positions from a batch to the next batch, whose file blocks are read in the background.
        reuse: Whether the second batch after a batch may overwrite it.
        period: Number of consecutive batches of a step. Small ones are made at once, which takes less time.
    """

    def __init__(
        self,
        split: Split,
        storage: Storage,
        seed: int,
        dtype: Any,
        memory: Memory = own_buffers,
        stride: int = 0,
        reuse: bool = True,
        period: int = 1,
    ) -> None:
        self._split, self._storage, self._seed = split, storage, seed
        self._dtype: np.dtype[Any] = split.dtype if dtype is None else np.dtype(dtype)
        self._scale = 1.0 if dtype is None else split.scale
        self._memory, self._stride, self._reuse, self._period = memory, stride, reuse, period
        self._block = Batch(None, (), 0)  # consecutive batches that were made at once
        # Two sets of buffers, so that a batch stays valid while the next one is made.
        self._buffers: list[tuple[Array, Array]] = [(np.empty(0), np.empty(0))] * 2
        self._turn = 0

    def __len__(self) -> int:
        return len(self._split)

    def batch(self, position: int, count: int) -> Batch:
        """Return the examples at [position, position + count) of the endless stream; see ``Split.order``.

        Returns:
            Examples, shape ``(count, *split.shape)``, of ``dtype`` and scaled; labels, shape
            ``(count, *split.label_shape)``. Unless ``reuse`` is False, both are overwritten by the second call after
            this one, or when ``memory`` returns the same arrays again.

        Raises:
            DataError: There are fewer examples than ``count``, or they cannot be read.
        """
        start = position - self._block.position
        if 0 <= start <= self._block.count - count:
            return self._block.part(start, start + count)
        if (at_once := self._at_once(count)) == 1:
            return self._make(position, count)
        self._block = self._make(position, at_once * count)
        return self._block.part(0, count)

    def index_batch(self, position: int, count: int) -> IndexBatch:
        """Return the indices of the examples that ``batch`` returns."""
        return IndexBatch(self._split.order(position, count, self._seed), None, position)

    def sequential(self, start: int, stop: int, end: int | None = None) -> Batch:
        """Return the examples [start, stop) in the order of the split, in the form of ``batch``."""
        return self._take(np.arange(start, stop), start)

    def close(self) -> None:
        """Stop reading ahead."""
        self._storage.close()

    def _at_once(self, count: int) -> int:
        """Return how many batches of a step, of ``count`` examples each, are made at once: a divisor of ``period``."""
        nbytes = count * math.prod(self._split.shape) * self._dtype.itemsize
        most = min(self._period, len(self._split) // count, _BLOCK_BYTES // max(1, nbytes))
        return max((n for n in range(1, most + 1) if self._period % n == 0), default=1)

    def _make(self, position: int, count: int) -> Batch:
        """Make a batch, and read the blocks of the next one in the background."""
        made = self._take(self._split.order(position, count, self._seed), position)
        if isinstance(self._storage, Streaming):
            # In modes with servers the next position is a guess, which suffices to read the right part of a file.
            self._storage.expect(self._split.order(position + self._stride, count, self._seed))
        return made

    def _take(self, indices: Array, position: int) -> Batch:
        examples, labels = self._memory(len(indices)) or self._next_buffers(len(indices))
        self._storage.take(indices, self._scale, examples, labels)
        self._block = Batch(None, (), 0)  # its memory may be reused
        return Batch(examples, labels, position)

    def _next_buffers(self, count: int) -> tuple[Array, Array]:
        self._turn = 1 - self._turn
        examples, labels = self._buffers[self._turn]
        if len(examples) < count or not self._reuse:
            examples = np.empty((count, *self._split.shape), self._dtype)
            labels = np.empty((count, *self._split.label_shape), self._split.label_dtype)
            self._buffers[self._turn] = examples, labels
        return examples[:count], labels[:count]


class IndexLoader:
    """Makes the batches of a ``Loader`` or, once the device has a copy of the split, index batches. Local.

    Args:
        loader: Makes the first batches, for which the model allocates its memory, and all batches if the split is not
            cached.
        cache: Copies the split to the device if there is room left, and returns whether it did.
    """

    def __init__(self, loader: Loader, cache: Callable[[], bool]) -> None:
        self._loader, self._cache, self._made, self._is_cached = loader, cache, 0, False

    def __len__(self) -> int:
        return len(self._loader)

    def batch(self, position: int, count: int) -> Batch:
        """Return the examples at [position, position + count) of the endless stream; see ``Loader.batch``."""
        if self._made == _FIRST_BATCHES:
            self._is_cached = self._cache()
        self._made += 1
        return self._loader.index_batch(position, count) if self._is_cached else self._loader.batch(position, count)

    def sequential(self, start: int, stop: int, end: int | None = None) -> Batch:
        """Return the examples [start, stop) in the order of the split."""
        return self._loader.sequential(start, stop)

    def close(self) -> None:
        """Stop threads."""
        self._loader.close()


def _copy(stored: Array, indices: Array, scale: float, out: Array) -> None:
    """Set out[i] = scale * stored[indices[i]]; needs no kernel if the bytes are unchanged."""
    if out.dtype == stored.dtype and out.dtype.kind != "f":
        np.take(stored, indices, axis=0, out=out, mode="clip")
    else:
        ops.take(stored, indices, scale, out)
