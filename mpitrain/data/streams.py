"""Streams of examples that can only be read from their beginning."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..core import activity
from ..errors import DataError
from .example_batches import errors_named
from .orders import Order, Sequential
from .split import DatasetSplit, Split

_REPORT_S = 10.0  # seconds between reports while examples are skipped
_log = logging.getLogger(__name__)

Stream = Iterable[Any] | Callable[[int, int], Iterable[Any]]


class StreamSplit(DatasetSplit):
    """Examples of a stream, of which each process that loads examples takes a share; see ``stream``."""

    is_stream = True

    def __init__(self, examples: Stream, length: int) -> None:
        super().__init__(range(length), f"the stream {getattr(examples, '__name__', type(examples).__name__)}")
        self._examples, self._order = examples, Sequential()
        self._share, self._shares = 0, 1
        self._iterator: Iterator[Any] | None = None

    def start(self, share: int, shares: int, is_forked: bool = False) -> None:
        self._share, self._shares, self._iterator = share, shares, None

    def ordered(self, order: Order | Callable[[int, int], int]) -> Split:
        if not isinstance(order, Sequential):
            raise DataError(f"{self.source} has a fixed order of examples, which cannot be changed")
        return self

    def sample_digest(self) -> str:
        return "a stream"

    def identity(self) -> str:
        return "a stream"

    def _load_each(self, indices: list[int], seed: int, position: int) -> list[Any]:
        with errors_named(self.dataset, self.source, []):
            if self._iterator is None:  # also after a resume: the examples of earlier batches are skipped
                self._skip(position // (len(indices) * self._shares) * len(indices))
            transformed = self._batches.transformed
            return [transformed(self._next(), seed, position + place) for place in range(len(indices))]

    def _skip(self, count: int) -> None:
        """Begin after the first ``count`` examples of this process: at once if the source can skip, and has as many."""
        self._iterator = self._beginning(count)
        for example in self._iterator if count else ():
            self._iterator = itertools.chain([example], self._iterator)
            return
        self._iterator = self._beginning()
        reported_s = time.monotonic()
        for number in range(count):
            self._next()
            activity.mark_progress()
            if time.monotonic() > reported_s + _REPORT_S:
                reported_s = time.monotonic()
                _log.info("%s: skipped %d of %d examples that were used before", self.source, number, count)

    def _next(self) -> Any:
        """Return the next example of this process; after the last example, the first one again."""
        assert self._iterator is not None
        for _ in range(2):
            for example in self._iterator:
                return example
            self._iterator = self._beginning()
        raise DataError(f"{self.source} has no examples for process {self._share} of {self._shares} that read it")

    def _beginning(self, skipped: int = 0) -> Iterator[Any]:
        """Return this process's examples without the first ones; none if the source cannot skip."""
        examples: Any = self._examples
        share, shares = self._share, self._shares
        if not hasattr(examples, "__iter__"):
            examples, share, shares = examples(share, shares), 0, 1
        if skipped:
            examples = examples.skip(skipped * shares) if callable(getattr(examples, "skip", None)) else ()
        return itertools.islice(examples, share, None, shares)


def stream(examples: Stream, length: int) -> StreamSplit:
    """Return a split of examples that can only be read in their order, such as a torch ``IterableDataset``.

    Each process that loads examples takes a share: every n-th example. To read less, pass a function that opens a share
    itself: ``lambda share, shares: read(files[share::shares])``.

    In the default order, other splits guarantee that each example is used once in an epoch, also after a resume; a
    stream does not. A resumed run skips as many examples as have been used. These are the same examples only in
    ``sync``, with the same number of ranks and without data workers. Skipping reads these examples, unless ``examples``
    has a method ``skip``, like the streams of Hugging Face ``datasets``. With data workers, examples that are loaded
    ahead may be lost. A stream is not shuffled, and cannot be used for validation.

    Args:
        examples: An object that can be iterated repeatedly; or a function that returns the examples of a share.
        length: Number of examples in an epoch; a share with fewer examples is read again from its beginning.

    Raises:
        DataError: The length is not valid, or ``examples`` is an iterator.
    """
    if not isinstance(length, int) or length < 1:
        raise DataError(f"stream got length={length!r}: must be the number of examples in an epoch, at least 1")
    if isinstance(examples, Iterator):
        raise DataError(
            "stream got an iterator, which can be read once: pass an object that can be iterated repeatedly"
        )
    return StreamSplit(examples, length)
