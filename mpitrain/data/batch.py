"""Batches: the examples that a model computes on at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..core.layout import Array
from .trees import part_of


@dataclass(slots=True)
class Batch:
    """Examples to compute on.

    Attributes:
        examples, labels: Arrays of shape (batch, ...) each.
        position: Index of the first example in the endless stream of examples.
    """

    examples: Any
    labels: Any
    position: int

    @property
    def count(self) -> int:
        """Number of examples."""
        return len(self.labels)

    def part(self, start: int, stop: int) -> Batch:
        """Return the examples [start, stop)."""
        return Batch(self.examples[start:stop], self.labels[start:stop], self.position + start)


@dataclass(slots=True)
class IndexBatch(Batch):
    """A batch of training data that is already on the model's device (``Model.cache_dataset``).

    Attributes:
        examples: Indices of the examples, shape (batch,), int64.
        labels: None.
    """

    @property
    def count(self) -> int:
        return len(self.examples)

    def part(self, start: int, stop: int) -> Batch:
        return IndexBatch(self.examples[start:stop], None, self.position + start)


@dataclass(slots=True)
class CollatedBatch(Batch):
    """A batch of examples with several parts: ``examples`` is a tree that includes the labels; ``labels`` is None."""

    size: int = 0

    @property
    def count(self) -> int:
        return self.size

    def part(self, start: int, stop: int) -> Batch:
        return type(self)(part_of(self.examples, start, stop), None, self.position + start, stop - start)


class Loading(NamedTuple):
    """The settings for batches of examples that are loaded one by one.

    Attributes:
        workers: Number of processes per rank that load examples; 0 if the rank itself loads them.
        prefetch: Number of batches that each of these processes loads ahead.
        share, shares: Index of this rank among the ranks that load examples, and the number of these ranks.
        dtype: Type of the examples in a batch of arrays; None to keep their type.
        check: Called with the examples and labels of a batch of arrays, and their indices or the index of the first
            example; raises DataError.
        period: Number of batches that this rank loads for a step.
    """

    workers: int = 0
    prefetch: int = 1
    share: int = 0
    shares: int = 1
    dtype: Any = None
    check: Callable[[Array, Array, Any], None] | None = None
    period: int = 1


class BatchSource(Protocol):
    """Makes the batches of a split: a ``Loader``, or the result of ``Split.own_loader``. Local."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def batch(self, position: int, count: int) -> Batch:
        """Return the examples at [position, position + count) of the endless stream; see ``Loader.batch``."""

    def sequential(self, start: int, stop: int, end: int | None = None) -> Batch:
        """Return the examples [start, stop) in the order of the split.

        Args:
            end: Index after the last example that will be requested by the next calls, for reading ahead.
        """

    def close(self) -> None:
        """Stop work in the background."""
