"""Batches of examples that are loaded one by one, in the rank itself."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from ..core.layout import Array
from .batch import Batch, Loading
from .random_numbers import LOOP_STREAM, seed_all
from .trees import Allocate


class LoadsBatches(Protocol):
    """A split whose batches can be made in any process."""

    source: str

    def __len__(self) -> int: ...

    def order(self, position: int, count: int, seed: int) -> Array: ...

    def start(self, share: int, shares: int, is_forked: bool = False) -> None: ...

    def load(self, indices: Array, seed: int, position: int, allocate: Allocate = np.empty) -> Batch: ...

    def finish(self, batch: Batch, loading: Loading, indices: Array) -> Batch: ...


class Request(NamedTuple):
    """A batch to load.

    Attributes:
        position: Position of the first example in the stream; its index if ``end`` is not None.
        length: Number of examples.
        end: For examples in the order of the split: index after the last example that will be requested; else None.
    """

    position: int
    length: int
    end: int | None = None


class DatasetLoader:
    """Makes batches of examples that are loaded one by one; see ``data.BatchSource``.

    Args:
        split: The examples.
        seed: Determines the order, and the random numbers of each example.
        loading: How batches are made.
    """

    def __init__(self, split: LoadsBatches, seed: int, loading: Loading) -> None:
        self._split, self._seed, self._loading = split, seed, loading
        split.start(loading.share, loading.shares)

    def __len__(self) -> int:
        return len(self._split)

    def batch(self, position: int, count: int) -> Batch:
        """Return the examples at [position, position + count) of the endless stream.

        Afterwards, the process's random number generators are seeded for the rest of the step.

        Raises:
            DataError: An example cannot be loaded; the message names it.
        """
        made, indices = self._load(Request(position, count))
        seed_all(self._seed, position, LOOP_STREAM)
        return self._split.finish(made, self._loading, indices)

    def sequential(self, start: int, stop: int, end: int | None = None) -> Batch:
        """Return the examples [start, stop) in the order of the split."""
        made, indices = self._load(Request(start, stop - start, stop if end is None else end))
        return self._split.finish(made, self._loading, indices)

    def close(self) -> None:
        """Do nothing."""

    def _load(self, request: Request) -> tuple[Batch, Array]:
        """Return a batch, and the indices of its examples."""
        indices = indices_of(self._split, request, self._seed)
        return self._split.load(indices, self._seed, request.position), indices


def indices_of(split: LoadsBatches, request: Request, seed: int) -> Array:
    """Return the indices of a batch's examples."""
    position, length, end = request
    return split.order(position, length, seed) if end is None else np.arange(position, position + length)
