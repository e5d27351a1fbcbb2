"""The examples of arrays one by one, for functions of one example."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ..core.layout import Array
from .batch import Batch

SAMPLE = 16  # number of examples in a digest


class TakesExamples(Protocol):
    """See ``InMemory``."""

    def take(self, indices: Array, scale: float, examples: Array, labels: Array) -> None: ...

    def start_in_process(self) -> None: ...


class StoredExamples:
    """The examples of a split of arrays, one by one: pairs of an example, scaled, and its label.

    Args:
        split: A ``Split`` of arrays; not typed, because ``split`` imports this module.
        storage: The memory that contains the examples, if they have been loaded; None to read them from the split.

    Attributes:
        split: As given.
    """

    def __init__(self, split: Any, storage: TakesExamples | None = None) -> None:
        self.split, self._storage = split, storage
        self._whole: Batch | None = None

    def start_in_process(self) -> None:
        """Prepare for use in a forked process."""
        if self._storage is not None:
            self._storage.start_in_process()

    def __len__(self) -> int:
        return len(self.split)

    def __getitems__(self, indices: list[int]) -> list[tuple[Array, Array]]:
        split = self.split
        if self._storage is not None:
            examples = np.empty((len(indices), *split.shape), split.dtype)
            labels = np.empty((len(indices), *split.label_shape), split.label_dtype)
            self._storage.take(np.array(indices), 1.0, examples, labels)
        else:
            parts = [self._read(index) for index in indices]
            examples = np.concatenate([part.examples for part in parts])
            labels = np.concatenate([part.labels for part in parts])
        if split.scale != 1:
            examples = split.scaled(examples, np.float32)
        return list(zip(examples, labels, strict=True))

    def _read(self, index: int) -> Batch:
        if self.split.has_ranges or index < SAMPLE:  # the digest reads these examples alone
            batch: Batch = self.split.read_batch(index, index + 1)
            return batch
        if self._whole is None:
            self._whole = self.split.read_batch(0, len(self.split))
        return self._whole.part(index, index + 1)
